package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
)

// kill ends a proxy that doesn't do it, and removes its socket.
func (in *instance) kill(ctx context.Context, cfg *config.Config) error {
	p, err := in.process()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout(askTimeout))
	defer cancel()
	if err := p.Kill(ctx); err != nil {
		return err
	}
	_ = os.Remove(in.client.Socket) // another one may have done it
	return nil
}

// process finds a proxy's. It is the one whose number it says itself, which must be that of a proxy; where it doesn't answer, the
// one that listens at its socket. The zero value is none any more.
func (in *instance) process() (process.ID, error) {
	is := func(p process.Found) bool { return p.PID == in.status.PID && p.Argv[3] == in.status.Identity }
	if in.status.PID == 0 {
		socket, err := listening(in.client.Socket)
		if err != nil {
			return process.ID{}, errors.Join(in.silent(), err)
		}
		is = func(p process.Found) bool { return holds(p.PID, socket) }
	}
	found, err := process.Find(func(argv []string) bool { return len(argv) == 4 && argv[1] == "proxy" && argv[2] == "--keeper" })
	if err != nil {
		return process.ID{}, err
	}
	for _, p := range found {
		if is(p) {
			return p.ID, nil
		}
	}
	if in.status.PID == 0 && !isDead(in.client.Socket) {
		return process.ID{}, fmt.Errorf("%w, and it is no proxy's process that listens there: `ss -xlp` says whose", in.silent())
	}
	return process.ID{}, nil
}

// listening is the socket that listens at a path, as it is called in /proc/PID/fd; see proc_pid_net(5).
func listening(path string) (string, error) {
	const acceptsConnections = "00010000" // __SO_ACCEPTCON
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		// Num RefCount Protocol Flags Type St Inode Path
		fields := strings.Fields(line)
		if len(fields) >= 8 && fields[3] == acceptsConnections && strings.HasSuffix(line, " "+path+"\n") {
			return "socket:[" + fields[6] + "]", nil
		}
	}
	return "", fmt.Errorf("nobody listens at %s in this network namespace", path)
}

// holds tells whether a process has a file that is called so in /proc/PID/fd.
func holds(pid int, file string) bool {
	dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false // it has ended
	}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && to == file {
			return true
		}
	}
	return false
}

// seize takes a port from a process that doesn't hand it over. Who waits there to be accepted doesn't notice.
func seize(p process.ID, port netip.AddrPort) (*net.TCPListener, error) {
	pidfd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	defer unix.Close(pidfd)
	if !p.Alive() { // looked at after the open: the pidfd is of the process that is meant
		return nil, fmt.Errorf("process %d has ended", p.PID)
	}
	entries, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(p.PID), "fd"))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		fd, err := unix.PidfdGetfd(pidfd, n, 0)
		if errors.Is(err, unix.EBADF) {
			continue // it is closed
		}
		if err != nil {
			return nil, fmt.Errorf("take descriptor %d of process %d: %w", n, p.PID, err)
		}
		if l := listenerAt(fd, port); l != nil {
			return l, nil
		}
	}
	return nil, fmt.Errorf("process %d doesn't listen at %s", p.PID, port)
}

// listenerAt takes a descriptor, and returns a listener of its own, if it is one of that port.
func listenerAt(fd int, port netip.AddrPort) *net.TCPListener {
	// Whatever isn't a socket that listens has an error or a 0.
	if listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || listens != 1 {
		_ = unix.Close(fd)
		return nil
	}
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil
	}
	at, err := netip.ParseAddrPort(l.Addr().String())
	if tl, ok := l.(*net.TCPListener); ok && err == nil && samePort(at, port) {
		return tl
	}
	_ = l.Close()
	return nil
}
