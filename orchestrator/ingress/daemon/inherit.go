package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// maxLog is how long the log may get, in bytes, before it is set aside.
const maxLog = 16 << 20

// inherited is what a proxy has from its keeper, or makes where there is none.
type inherited struct {
	listener *net.TCPListener
	control  net.Listener // nil without a keeper
	readyTo  *os.File
	old      *os.File
}

func inherit(ctx context.Context, cfg *config.Config, o *Options) (*inherited, error) {
	if o.Identity == "" {
		l, err := Listen(ctx, cfg)
		if err != nil {
			return nil, err
		}
		return &inherited{listener: l}, nil
	}
	for fd := fdListener; fd <= fdOldLog; fd++ {
		unix.CloseOnExec(fd)
	}
	in := &inherited{readyTo: os.NewFile(fdReady, "ready"), old: os.NewFile(fdOldLog, "old log")}
	var err error
	if in.listener, err = listenerOf(fdListener, "listener", tcpListener); err != nil {
		return nil, err
	}
	if in.control, err = listenerOf(fdControl, "control", net.FileListener); err != nil {
		return nil, errors.Join(err, in.listener.Close())
	}
	o.Log = slog.New(slog.NewTextHandler(&logFile{f: os.Stderr, old: in.old}, &slog.HandlerOptions{Level: levelOf(o.Log)}))
	return in, nil
}

func listenerOf[L any](fd int, name string, of func(*os.File) (L, error)) (L, error) {
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	l, err := of(f)
	if err != nil {
		return l, fmt.Errorf("descriptor %d must be the %s: %w", fd, name, err)
	}
	return l, nil
}

// Listen opens the port that the configuration names.
func Listen(ctx context.Context, cfg *config.Config) (*net.TCPListener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Proxy.Listen.String())
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("%s is taken: `ss -ltnp` says by whom; set proxy.listen to have another", cfg.Proxy.Listen)
	}
	if err != nil {
		return nil, fmt.Errorf("listen for clients: %w", err)
	}
	return l.(*net.TCPListener), nil
}

// ready tells the keeper that this proxy serves.
func (in *inherited) ready() error {
	if in.readyTo == nil {
		return nil
	}
	_, err := in.readyTo.Write([]byte{1})
	err = errors.Join(err, in.readyTo.Close())
	in.readyTo = nil
	return err
}

func (in *inherited) close() {
	_ = in.listener.Close() // maybe it is already
	if in.control != nil {
		_ = in.control.Close()
	}
	if in.readyTo != nil {
		_ = in.readyTo.Close()
	}
}

// levelOf is the lowest level that a logger has.
func levelOf(l *slog.Logger) slog.Level {
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn} {
		if l.Enabled(context.Background(), level) {
			return level
		}
	}
	return slog.LevelError
}

// logFile is the log, whose content moves to another file when it is long: this process can make none and rename none.
type logFile struct {
	mu     sync.Mutex
	f, old *os.File // appended to
}

// Write is of io.Writer.
func (l *logFile) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if st, err := l.f.Stat(); err == nil && st.Mode().IsRegular() && st.Size() > maxLog {
		if err := l.setAside(st.Size()); err != nil {
			return 0, err
		}
	}
	return l.f.Write(b)
}

func (l *logFile) setAside(size int64) error {
	if err := l.old.Truncate(0); err != nil {
		return err
	}
	if _, err := io.Copy(l.old, io.NewSectionReader(l.f, 0, size)); err != nil {
		return err
	}
	return l.f.Truncate(0)
}
