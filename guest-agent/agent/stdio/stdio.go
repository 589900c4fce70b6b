// Package stdio couples a process's standard streams, pipes or a pseudo-terminal, with streams to the host. Each
// direction goes at the pace of its slower end, and a process that has ended is drained and let go, whoever else may
// still hold its pipes.
package stdio

import (
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// pipeSize is a pipe's capacity, and so the most that an ended process has left in one. A terminal holds less.
const pipeSize = 256 << 10

// copySize is what is copied at once.
const copySize = 32 << 10

// Stream is a stream to the host.
type Stream interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// Streams are the streams of one process. A nil one reads as empty and swallows what is written. In may be the same as
// Out.
type Streams struct {
	In, Out, Err Stream
}

// Close gives all of them up.
func (s Streams) Close() {
	for _, st := range []Stream{s.In, s.Out, s.Err} {
		if st != nil {
			_ = st.Close()
		}
	}
}

// Process is a process's end of it.
type Process struct {
	streams  Streams
	terminal *os.File    // the master side, nil without one
	theirs   [3]*os.File // the ends of the pipes that the process gets
	stdin    *os.File    // our ends
	outputs  []*output
	pumps    sync.WaitGroup
	ended    sync.Once
}

// Pipes makes a pipe for each stream.
func Pipes(s Streams) (_ *Process, err error) {
	p := &Process{streams: s}
	defer func() {
		if err != nil {
			p.Abandon()
		}
	}()
	if s.In != nil {
		if p.theirs[0], p.stdin, err = pipe(false); err != nil {
			return nil, err
		}
	}
	for i, st := range []Stream{s.Out, s.Err} {
		if st == nil {
			continue
		}
		var ours *os.File
		if ours, p.theirs[i+1], err = pipe(true); err != nil {
			return nil, err
		}
		p.outputs = append(p.outputs, &output{from: ours, to: st})
	}
	return p, nil
}

// pipe makes a pipe of which only our end, the reading one or the other, doesn't block.
func pipe(readingIsOurs bool) (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe", err)
	}
	// Smaller is slower and nothing else: fs.pipe-user-pages-soft may not allow for it.
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pipeSize)
	ours := fds[1]
	if readingIsOurs {
		ours = fds[0]
	}
	if err := unix.SetNonblock(ours, true); err != nil {
		_, _ = unix.Close(fds[0]), unix.Close(fds[1])
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// Terminal is for a process whose terminal Attach brings later. s.Err isn't used.
func Terminal(s Streams) *Process { return &Process{streams: s} }

// Files are what the process gets as standard input, output and error; nil stands for /dev/null.
func (p *Process) Files() [3]*os.File { return p.theirs }

// Attach takes the master side of the process's terminal. Before Start.
func (p *Process) Attach(master *os.File) {
	p.terminal, p.stdin = master, master
	var to Stream = nowhere{}
	if p.streams.Out != nil {
		to = p.streams.Out
	}
	p.outputs = append(p.outputs, &output{from: master, to: to})
}

// Start closes the process's own ends, which it has by now, and begins to copy.
func (p *Process) Start() {
	p.closeTheirs()
	for _, o := range p.outputs {
		p.pumps.Go(o.run)
	}
	if p.stdin != nil && p.streams.In != nil {
		p.pumps.Go(p.feed)
	}
}

// Ended says that the process has ended: what it has left in its pipes is still sent, and no more. It doesn't wait for
// that. Idempotent.
func (p *Process) Ended() {
	p.ended.Do(func() {
		for _, o := range p.outputs {
			_ = o.from.SetReadDeadline(time.Unix(1, 0))
		}
		if p.stdin != nil && p.terminal == nil {
			_ = p.stdin.Close()
		}
		if p.streams.In != nil && p.streams.In != p.streams.Out {
			_ = p.streams.In.Close()
		}
	})
}

// Wait returns when all has been copied, after Ended or when the process has closed everything.
func (p *Process) Wait() { p.pumps.Wait() }

// Abandon closes everything of a process that never started.
func (p *Process) Abandon() {
	p.closeTheirs()
	for _, o := range p.outputs {
		_ = o.from.Close()
	}
	if p.stdin != nil {
		_ = p.stdin.Close()
	}
	p.streams.Close()
}

func (p *Process) closeTheirs() {
	for i, f := range p.theirs {
		if f != nil {
			_ = f.Close()
			p.theirs[i] = nil
		}
	}
}

// Resize sets the terminal's size. Without a terminal, or after its end, it does nothing.
func (p *Process) Resize(columns, rows uint16) error {
	if p.terminal == nil {
		return nil
	}
	raw, err := p.terminal.SyscallConn()
	if err != nil {
		return nil // closed
	}
	var ioctl error
	err = raw.Control(func(fd uintptr) {
		ioctl = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows})
	})
	if err != nil {
		return nil // closed
	}
	return os.NewSyscallError("set the terminal's size", ioctl)
}

// feed copies from the host to the process. A pipe is closed when the host says that this was all, or the process reads
// no more; not when the host is gone, which is no end of the input. A terminal stays open for output.
func (p *Process) feed() {
	b := make([]byte, copySize)
	for {
		n, err := p.streams.In.Read(b)
		if n > 0 {
			if _, failed := p.stdin.Write(b[:n]); failed != nil {
				if p.terminal == nil {
					_ = p.stdin.Close()
					_ = p.streams.In.Close()
				}
				return
			}
		}
		if err == io.EOF && p.terminal == nil {
			_ = p.stdin.Close()
		}
		if err != nil {
			return
		}
	}
}

// output copies from a process to the host.
type output struct {
	from *os.File
	to   Stream
}

func (o *output) run() {
	defer o.to.Close()
	defer o.from.Close()
	b := make([]byte, copySize)
	for {
		n, err := o.from.Read(b)
		if !o.send(b[:n]) {
			return
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			o.drain(b)
			return
		}
		if err != nil { // EOF, or EIO of a terminal that nobody has open
			return
		}
	}
}

// send writes to the host. It answers false when the host doesn't want any more, which the process finds out by its
// next write (SIGPIPE, SIGHUP). When the host is gone altogether, output vanishes and the process goes on.
func (o *output) send(b []byte) bool {
	if len(b) == 0 {
		return true
	}
	_, err := o.to.Write(b)
	if err != nil {
		if errors.Is(err, mux.ErrReset) {
			return false
		}
		o.to = nowhere{}
	}
	return true
}

// drain sends what is in the pipe, and no more than one may hold: another process may have it open and go on writing.
func (o *output) drain(b []byte) {
	if err := o.from.SetReadDeadline(time.Time{}); err != nil {
		return
	}
	raw, err := o.from.SyscallConn()
	if err != nil {
		return
	}
	for left := pipeSize; left > 0; {
		var n int
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			n, failed = unix.Read(int(fd), b[:min(len(b), left)])
			return true // never wait
		})
		if err != nil || failed != nil || n <= 0 || !o.send(b[:n]) {
			return
		}
		left -= n
	}
}

// nowhere is the stream that swallows everything.
type nowhere struct{}

func (nowhere) Read([]byte) (int, error)    { return 0, io.EOF }
func (nowhere) Write(p []byte) (int, error) { return len(p), nil }
func (nowhere) Close() error                { return nil }
func (nowhere) CloseWrite() error           { return nil }
