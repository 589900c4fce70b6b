package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/cubesandbox/cube/internal/undo"
)

// How long a stream is measured, after so long in which it gets going.
const (
	window = 250 * time.Millisecond
	warmUp = 50 * time.Millisecond
	// stalled ends a stream of which nothing comes.
	stalled = 30 * time.Second
)

// port is the server's.
var port = netip.AddrPortFrom(server, 5201)

// stream sends while it reads for the window, and returns what was read a second.
func stream(send func() error, read func() (int, error)) (float64, error) {
	sent := make(chan error, 1)
	go func() {
		for {
			if err := send(); err != nil {
				sent <- err
				return
			}
		}
	}()
	rate, err := measure(read)
	select {
	case e := <-sent: // it ends when the caller closes, and not before
		err = errors.Join(err, fmt.Errorf("send: %w", e))
	default:
	}
	return rate, err
}

func measure(read func() (int, error)) (float64, error) {
	var counted int
	var began time.Time
	for started := time.Now(); ; {
		n, err := read()
		if err != nil {
			return 0, fmt.Errorf("receive: %w", err)
		}
		at := time.Now()
		switch {
		case at.Sub(started) < warmUp:
		case began.IsZero():
			began = at
		default:
			counted += n
			if d := at.Sub(began); d >= window {
				return float64(counted) / d.Seconds(), nil
			}
		}
	}
}

// tcp measures a connection that the client opens: bits a second from it, or to it.
func tcp(p *path, toClient bool) (_ float64, err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	var l net.Listener
	if err := p.internet.Do(func() (err error) { l, err = net.Listen("tcp4", port.String()); return err }); err != nil {
		return 0, err
	}
	u.Push(l.Close)
	var from, to net.Conn
	if err := p.client.Do(func() (err error) { from, err = net.DialTimeout("tcp4", port.String(), stalled); return err }); err != nil {
		return 0, err
	}
	u.Push(from.Close)
	if err := l.(*net.TCPListener).SetDeadline(time.Now().Add(stalled)); err != nil {
		return 0, err
	}
	if to, err = l.Accept(); err != nil {
		return 0, err
	}
	u.Push(to.Close)
	if toClient {
		from, to = to, from
	}
	if err := errors.Join(from.SetDeadline(time.Now().Add(stalled)), to.SetDeadline(time.Now().Add(stalled))); err != nil {
		return 0, err
	}
	data, room := make([]byte, 256<<10), make([]byte, 256<<10)
	bytes, err := stream(func() error { _, err := from.Write(data); return err }, func() (int, error) { return to.Read(room) })
	return bytes * 8, err
}
