package stdio

import (
	"context"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// sink is where output goes.
type sink struct {
	// stdout and stderr take what the process writes there. Writes wait for as long as the sink takes nothing, and fail
	// once it is closed; until then, a log that loses output takes all of it.
	stdout, stderr io.Writer
	// close ends the output, also for writes that wait. Idempotent; it waits for nobody.
	close func()
	// ended is closed when nothing runs any more that close has told to end; nil for sinks that run nothing.
	ended <-chan struct{}
}

func openSink(ctx context.Context, t target, o Owner) (*sink, error) {
	switch t.scheme {
	case schemeFile:
		return openFile(t, o)
	case schemeBinary, schemeBinaryV2:
		return startLogger(ctx, t, o)
	}
	// The reading end first: with it, the writing end opens at once. It also keeps the fifo readable, and what is in it,
	// when its reader has gone.
	r, err := openFifo(t.path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	w, err := openFifo(t.path, os.O_WRONLY)
	if err != nil {
		r.Close()
		return nil, err
	}
	return &sink{stdout: w, stderr: w, close: func() { w.Close(); r.Close() }}, nil
}

// openFifo opens one end without waiting for the other; reads and writes then wait in Go's poller, and Close ends them.
func openFifo(path string, mode int) (*os.File, error) {
	f, err := os.OpenFile(path, mode|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && fi.Mode().Type() != os.ModeNamedPipe {
		err = invalid("%s is not a fifo", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
