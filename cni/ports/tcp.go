package ports

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// Bounds of the wait after a connection that couldn't be accepted, for want of descriptors or memory; it doubles between.
const firstPause, lastPause = 5 * time.Millisecond, time.Second

// serveTCP accepts connections until the mapping is cut. Those beyond the limit are refused.
func (m *mapping) serveTCP(l *net.TCPListener) {
	pause := firstPause
	for {
		client, err := l.AcceptTCP()
		switch {
		case err == nil:
			pause = firstPause
		case errors.Is(err, net.ErrClosed):
			return
		default:
			m.server.cfg.Log.Error("accept a connection", "port", m.lease.Port, "again in", pause, "error", err)
			select {
			case <-m.ctx.Done():
				return
			case <-time.After(pause):
			}
			pause = min(2*pause, lastPause)
			continue
		}
		if !m.enter() {
			m.server.cfg.Log.Debug("a connection is refused: there are too many", "port", m.lease.Port, "client", client.RemoteAddr())
			reset(client)
			continue
		}
		m.serving.Go(func() {
			defer m.leave()
			m.forward(client)
		})
	}
}

// forward passes a connection on, and resets it where that can't be done.
func (m *mapping) forward(client *net.TCPConn) {
	defer reset(client)
	if m.ended() {
		return
	}
	c, err := m.dial("tcp4")
	if err != nil {
		m.server.cfg.Log.Debug("a connection isn't passed on", "port", m.lease.Port, "client", client.RemoteAddr(), "error", err)
		return
	}
	guest := c.(*net.TCPConn)
	defer reset(guest)
	// While it was dialled the sandbox may have gone, and its address have become another's.
	if m.ended() {
		return
	}
	stop := context.AfterFunc(m.ctx, func() { reset(client); reset(guest) })
	defer stop()
	var both sync.WaitGroup
	both.Go(func() { pass(guest, client) })
	both.Go(func() { pass(client, guest) })
	both.Wait()
	// What both have ended is closed as it should be.
	_, _ = client.Close(), guest.Close()
}

// pass copies one direction, and its end. What breaks it breaks the other one too.
func pass(to, from *net.TCPConn) {
	_, err := io.Copy(to, from)
	if err == nil {
		err = to.CloseWrite()
	}
	if err != nil {
		reset(to)
		reset(from)
	}
}

// reset closes a connection, unsent data and all; one that is closed stays as it is.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}
