// Package port opens the byte channel to the host: a virtio-serial port.
package port

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/uevent"
)

// class is where the kernel lists virtio-serial ports.
const class = "/sys/class/virtio-ports"

// Port is an open port.
type Port struct {
	f *os.File
	// opened gets a value when the host has opened its end, or has sent something.
	opened chan os.Signal
	heard  bool // something has been read; only Read uses it
}

// Open waits for the port of that name and opens it.
func Open(ctx context.Context, name string) (*Port, error) {
	var device string
	err := uevent.Until(ctx, "virtio-ports", func() (ok bool, err error) {
		device, err = find(class, name)
		return device != "", err
	})
	if err != nil {
		return nil, fmt.Errorf("find the port %q: %w", name, err)
	}
	p := &Port{opened: make(chan os.Signal, 1)}
	signal.Notify(p.opened, unix.SIGIO)
	// Not blocking, or each write would keep a CPU busy until the host has taken the data (drivers/char/virtio_console.c).
	fd, err := unix.Open(filepath.Join("/dev", device), unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: device, Err: err}
	}
	p.f = os.NewFile(uintptr(fd), device)
	if err := sigio(fd, true); err != nil {
		return nil, fmt.Errorf("watch the port %q: %w", name, err)
	}
	return p, nil
}

// sigio says whether the kernel sends SIGIO when the host opens or closes its end, or sends something.
func sigio(fd int, on bool) error {
	flags := unix.O_RDWR | unix.O_NONBLOCK
	if on {
		flags |= unix.O_ASYNC
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETOWN, os.Getpid()); err != nil {
			return err
		}
	}
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags)
	return err
}

// find returns the device of the port with that name, "" when there is none.
func find(class, name string) (string, error) {
	files, err := filepath.Glob(filepath.Join(class, "*/name"))
	if err != nil {
		return "", err
	}
	for _, f := range files {
		// A port that is just going: look at the next.
		if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == name {
			return filepath.Base(filepath.Dir(f)), nil
		}
	}
	return "", nil
}

// Read reads from the host; only one goroutine may. The kernel tells of the port before it tells that the host's end is
// open, and until then reading gives EOF; that one isn't passed on.
func (p *Port) Read(b []byte) (int, error) {
	for {
		n, err := p.f.Read(b)
		if p.heard || n == 0 && err != io.EOF {
			return n, err
		}
		if n > 0 {
			p.heard = true
			return n, p.listened()
		}
		<-p.opened
	}
}

// listened ends the signals, which would otherwise come with everything that the host sends.
func (p *Port) listened() error {
	signal.Stop(p.opened)
	raw, err := p.f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = sigio(int(fd), false) })
	return errors.Join(err, failed)
}

func (p *Port) Write(b []byte) (int, error) { return p.f.Write(b) }
