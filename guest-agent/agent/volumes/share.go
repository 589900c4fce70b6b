package volumes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// messageSize is the largest 9P message. The kernel takes a buffer of that size for each request, in one piece.
	messageSize = 128 << 10
	// copySize is what is copied at once.
	copySize = 64 << 10
	// silence is how long a server may say nothing while a container's end waits for it.
	silence = 10 * time.Second
)

// mount is a mounted share. The kernel's 9P client has one end of a pair of sockets; what it sends is copied to the
// stream, and what comes from there to it, until either is closed.
type mount struct {
	dir    string
	stream io.ReadWriteCloser
	socket net.Conn // our end
	heard  atomic.Int64
	pumps  sync.WaitGroup
}

// mountShare mounts a share at dir, which it makes. It takes the stream when it succeeds.
func mountShare(ctx context.Context, dir string, s Share) (_ *mount, err error) {
	socket, kernel, err := socketpair()
	if err != nil {
		return nil, err
	}
	// A mount keeps the kernel's end open itself; without one, nobody does.
	defer kernel.Close()
	if err := os.Mkdir(dir, 0o700); err != nil {
		_ = socket.Close()
		return nil, err
	}
	m := &mount{dir: dir, stream: s.Stream, socket: socket}
	m.pump()
	// The server has to answer before mount(2) does.
	stop := context.AfterFunc(ctx, m.abort)
	err = mount9P(dir, kernel, s.ReadOnly)
	if !stop() {
		err = errors.Join(err, context.Cause(ctx))
	}
	if err != nil {
		m.abort()
		return nil, errors.Join(fmt.Errorf("mount 9p: %w", err), m.unmount())
	}
	return m, nil
}

// mount9P has the kernel talk to a 9P server over a socket.
//
// The cache is for mapped memory only: what the host changes is seen at once, and a file can be mapped for writing. Each
// user of the guest is one of the server's, and it is the guest that checks permissions, so that a container sees files
// as it would on the host.
func mount9P(dir string, kernel *os.File, readOnly bool) error {
	flags := uintptr(unix.MS_NODEV) // a device's number means another device here
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	fd := kernel.Fd()
	data := fmt.Sprintf("trans=fd,rfdno=%d,wfdno=%d,version=9p2000.L,msize=%d,cache=mmap,access=client", fd, fd, messageSize)
	return unix.Mount("share", dir, "9p", flags, data)
}

func socketpair() (ours net.Conn, kernel *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	kernel = os.NewFile(uintptr(fds[1]), "9p")
	f := os.NewFile(uintptr(fds[0]), "9p")
	defer f.Close()
	if ours, err = net.FileConn(f); err != nil {
		_ = kernel.Close()
		return nil, nil, err
	}
	return ours, kernel, nil
}

// Close gives up the streams of shares that nobody has taken. Idempotent.
func Close(shares []Share) {
	for _, s := range shares {
		_ = s.Stream.Close()
	}
}

// pump copies in both directions until either end is closed.
func (m *mount) pump() {
	m.pumps.Go(func() { m.copy(m.stream, m.socket, func() {}) })
	m.pumps.Go(func() { m.copy(m.socket, m.stream, func() { m.heard.Store(time.Now().UnixNano()) }) })
}

// copy copies one direction, and closes both ends when it can't go on.
func (m *mount) copy(to io.Writer, from io.Reader, passing func()) {
	defer m.abort()
	b := make([]byte, copySize)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		passing()
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

// abort ends the connection with the server: whatever waits for an answer gets an error, and so does all that comes
// after. Idempotent.
func (m *mount) abort() {
	_ = m.socket.Close()
	_ = m.stream.Close()
}

// watch aborts when nothing has been heard for too long since from, until done is closed.
func (m *mount) watch(from time.Time, done <-chan struct{}) {
	timer := time.NewTimer(silence)
	defer timer.Stop()
	for {
		select {
		case <-done:
			return
		case <-timer.C:
		}
		last := time.Unix(0, max(m.heard.Load(), from.UnixNano()))
		left := silence - time.Since(last)
		if left <= 0 {
			m.abort()
			return
		}
		timer.Reset(left)
	}
}

// path is where the share's file is, or the whole of it. The server doesn't get to lead anywhere else by a link.
func (m *mount) path(file string) (string, error) {
	if file == "" {
		return m.dir, nil
	}
	path := filepath.Join(m.dir, file)
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		return "", fmt.Errorf("%s is a link", file)
	}
	return path, nil
}

// unmount unmounts the share and ends the connection. What can't be unmounted is detached. It returns when both ends are
// closed. Idempotent.
func (m *mount) unmount() error {
	err := unix.Unmount(m.dir, unix.UMOUNT_NOFOLLOW)
	if err != nil && err != unix.EINVAL && err != unix.ENOENT { // EINVAL: not mounted
		m.abort()
		err = unix.Unmount(m.dir, unix.UMOUNT_NOFOLLOW|unix.MNT_FORCE|unix.MNT_DETACH)
		if err != nil {
			return fmt.Errorf("unmount %s: %w", m.dir, err)
		}
	}
	// The kernel closes its end with the last mount.
	m.pumps.Wait()
	if err := os.Remove(m.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
