// Package stdio couples a process's standard streams, pipes or a pseudo-terminal, with streams to the host. Each
// direction goes at the pace of its slower end, and a process that has ended is drained and let go, whoever else may
// still hold its pipes. The streams of a process can be replaced while it runs: its machine may be restored, with another
// host.
package stdio

import (
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// pipeSize is a pipe's capacity, and so the most that an ended process has left in one. A terminal holds less.
const pipeSize = 256 << 10

// copySize is what is copied at once.
const copySize = 32 << 10

// Stream is a stream to the host.
type Stream interface {
	io.ReadWriteCloser
	CloseWrite() error
	// Unsent is what was written and no host will get from the stream, as its session is over.
	Unsent() []byte
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
	rest     Rest
	terminal *os.File    // the master side, nil without one
	theirs   [3]*os.File // the ends of the pipes that the process gets
	stdin    *os.File    // our ends
	outputs  []*output
	pumps    sync.WaitGroup

	mu      sync.Mutex
	streams Streams
	fed     chan struct{} // closed when nobody copies from streams.In any more
	ended   bool
}

// Rest tells whether the guest's work is at rest for a save: the channel is closed when it goes on. It is nil when it
// isn't at rest, and so is a nil Rest's.
type Rest func() <-chan struct{}

// Pipes makes a pipe for each stream.
func Pipes(s Streams, rest Rest) (_ *Process, err error) {
	p := &Process{rest: rest, streams: s, fed: closed()}
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
		p.outputs = append(p.outputs, newOutput(i+1, ours, st, rest))
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
func Terminal(s Streams, rest Rest) *Process { return &Process{rest: rest, streams: s, fed: closed()} }

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// Files are what the process gets as standard input, output and error; nil stands for /dev/null.
func (p *Process) Files() [3]*os.File { return p.theirs }

// Attach takes the master side of the process's terminal. Before Start.
func (p *Process) Attach(master *os.File) {
	p.terminal, p.stdin = master, master
	var to Stream = nowhere{}
	if p.streams.Out != nil {
		to = p.streams.Out
	}
	p.outputs = append(p.outputs, newOutput(1, master, to, p.rest))
}

// Start closes the process's own ends, which it has by now, and begins to copy.
func (p *Process) Start() {
	p.closeTheirs()
	for _, o := range p.outputs {
		p.pumps.Go(o.run)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.startFeed()
}

// startFeed begins to copy from streams.In, once nobody else does. p.mu is held.
func (p *Process) startFeed() {
	from, before, fed := p.streams.In, p.fed, make(chan struct{})
	if p.stdin == nil || from == nil {
		return
	}
	p.fed = fed
	p.pumps.Go(func() {
		defer close(fed)
		<-before
		p.feed(from)
	})
}

// Ended says that the process has ended: what it has left in its pipes is still sent, and no more. It doesn't wait for
// that. Idempotent.
func (p *Process) Ended() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	p.ended = true
	for _, o := range p.outputs {
		o.end()
	}
	if p.stdin != nil && p.terminal == nil {
		_ = p.stdin.Close()
	}
	if p.streams.In != nil && p.streams.In != p.streams.Out {
		_ = p.streams.In.Close()
	}
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
func (p *Process) feed(from Stream) {
	b := make([]byte, copySize)
	for {
		n, err := from.Read(b)
		if n > 0 {
			if _, failed := p.stdin.Write(b[:n]); failed != nil {
				if p.terminal == nil {
					_ = p.stdin.Close()
					_ = from.Close()
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
