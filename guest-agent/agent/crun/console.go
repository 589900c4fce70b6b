package crun

import (
	"errors"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// consoleTimeout bounds a wait for what must be there already.
const consoleTimeout = 5 * time.Second

// console is the socket that crun sends a terminal's master side to.
type console struct {
	path     string
	listener *net.UnixListener
}

func listenConsole(path string) (*console, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	return &console{path: path, listener: l}, nil
}

func (c *console) close() { _ = c.listener.Close() } // removes the socket, too

// receive takes the terminal that has been sent.
func (c *console) receive() (*os.File, error) {
	if err := c.listener.SetDeadline(time.Now().Add(consoleTimeout)); err != nil {
		return nil, err
	}
	conn, err := c.listener.AcceptUnix()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(consoleTimeout)); err != nil {
		return nil, err
	}
	fd, err := receiveFD(conn)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "terminal"), nil
}

// receiveFD receives a message with one file descriptor.
func receiveFD(conn *net.UnixConn) (int, error) {
	name, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	_, n, flags, _, err := conn.ReadMsgUnix(name, oob)
	if err != nil {
		return -1, err
	}
	if flags&unix.MSG_CTRUNC != 0 {
		return -1, errors.New("more than one file descriptor came")
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		return -1, err
	}
	if len(messages) != 1 {
		return -1, errors.New("no file descriptor came")
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return -1, err
	}
	unix.CloseOnExec(fds[0])
	return fds[0], nil
}
