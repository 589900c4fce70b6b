package stdio

import (
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// input is a fifo that a process reads from.
type input struct {
	r *os.File

	mu sync.Mutex
	// w keeps the fifo from being at its end while clients come and go; closed by finish.
	w *os.File
	// to is the stream, closed only by close: the guest must find it there even if its end came before the process.
	to    Stream
	ended bool
}

func openInput(uri string) (*input, error) {
	t, err := parse(uri)
	if err != nil {
		return nil, err
	}
	switch t.scheme {
	case schemeFile:
		r, err := os.Open(t.path)
		return &input{r: r}, err
	case schemeBinary, schemeBinaryV2:
		return nil, invalid("%q is for output; use a fifo or file://", uri)
	}
	// Without O_NONBLOCK this would wait for a client to open the other end.
	r, err := openFifo(t.path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	w, err := openFifo(t.path, os.O_WRONLY)
	if err != nil {
		r.Close()
		return nil, err
	}
	return &input{r: r, w: w}, nil
}

// copyTo copies until the input's end, or until the process reads no more.
func (in *input) copyTo(st Stream) {
	in.mu.Lock()
	in.to = st
	ended := in.ended
	in.mu.Unlock()
	if ended {
		st.Close()
		return
	}
	_, err := io.CopyBuffer(onlyWriter{st}, onlyReader{in.r}, make([]byte, copyBuffer))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// finish was called: what a client wrote before that is in the fifo now, also if the client still has it open.
		io.CopyBuffer(onlyWriter{st}, nowReader{in.r}, make([]byte, copyBuffer)) // either end may go at any time
	}
	st.CloseWrite() // fails for a stream that has gone, and its process with it
	in.finish()
	in.r.Close() // clients learn that nobody reads any more
}

// finish lets the input end after what is in the fifo.
func (in *input) finish() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.w == nil {
		return
	}
	in.w.Close()
	in.w = nil
	in.r.SetReadDeadline(time.Now()) // fails on a closed one, which is at its end anyway
}

// close ends the input where it is.
func (in *input) close() {
	in.finish()
	in.r.Close()
	in.mu.Lock()
	to := in.to
	in.ended = true
	in.mu.Unlock()
	if to != nil {
		to.Close()
	}
}

// nowReader reads what is there and is at its end when nothing is.
type nowReader struct{ f *os.File }

func (r nowReader) Read(p []byte) (n int, err error) {
	raw, err := r.f.SyscallConn()
	if err != nil {
		return 0, err
	}
	// Control, not Read: the latter waits, or fails for the deadline that finish has set.
	ctlErr := raw.Control(func(fd uintptr) { n, err = unix.Read(int(fd), p) })
	switch {
	case ctlErr != nil:
		return 0, ctlErr
	case err == unix.EINTR:
		return 0, nil
	case err == unix.EAGAIN, err == nil && n == 0:
		return 0, io.EOF
	case err != nil:
		return 0, err
	}
	return n, nil
}

type onlyWriter struct{ io.Writer }
