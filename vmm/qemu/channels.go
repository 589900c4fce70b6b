package qemu

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/undo"
)

// channels are the sockets between this process and the machine. The files are QEMU's ends.
type channels struct {
	qmp, agent, console, output     *os.File
	qmpConn, agentConn, consoleConn *net.UnixConn
	outputRead                      *os.File
}

func openChannels() (_ *channels, err error) {
	ch := &channels{}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(ch.closeHost)
	u.Push(ch.closeGuest)
	if ch.qmpConn, ch.qmp, err = socketpair("qmp"); err != nil {
		return nil, err
	}
	if ch.agentConn, ch.agent, err = socketpair("agent"); err != nil {
		return nil, err
	}
	if ch.consoleConn, ch.console, err = socketpair("console"); err != nil {
		return nil, err
	}
	if ch.outputRead, ch.output, err = os.Pipe(); err != nil {
		return nil, err
	}
	return ch, nil
}

// closeGuest closes QEMU's ends in this process.
func (ch *channels) closeGuest() error {
	for _, f := range []*os.File{ch.qmp, ch.agent, ch.console, ch.output} {
		_ = f.Close() // nil included
	}
	return nil
}

func (ch *channels) closeHost() error {
	for _, c := range []*net.UnixConn{ch.qmpConn, ch.agentConn, ch.consoleConn} {
		if c != nil {
			_ = c.Close()
		}
	}
	_ = ch.outputRead.Close() // nil included
	return nil
}

func socketpair(name string) (*net.UnixConn, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make the %s channel: %w", name, err)
	}
	host, guest := os.NewFile(uintptr(pair[0]), name), os.NewFile(uintptr(pair[1]), name)
	defer host.Close() // FileConn has its own duplicate
	c, err := net.FileConn(host)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make the %s channel: %w", name, err), guest.Close())
	}
	return c.(*net.UnixConn), guest, nil
}
