package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/undo"
)

const (
	payload = 64 // bytes of a packet
	batch   = 64 // packets a system call
	burst   = 16 // batches
	// room of a socket, for more than a burst.
	room = 16 << 20
	// lost is how long a burst's last packets are waited for.
	lost = 50 * time.Millisecond
)

// flow is of small UDP packets between two sockets.
type flow struct {
	undo.Stack
	from, to *net.UDPConn
	out, in  []ipv4.Message
}

// newFlow has the client open a flow and the server answer, whichever way it is used then. Release it.
func newFlow(p *path, toClient bool) (_ *flow, err error) {
	f := &flow{}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Release())
		}
	}()
	var near, far *net.UDPConn
	if err := p.internet.Do(func() (err error) { far, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(port)); return err }); err != nil {
		return nil, err
	}
	f.Push(far.Close)
	if err := p.client.Do(func() (err error) { near, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(port)); return err }); err != nil {
		return nil, err
	}
	f.Push(near.Close)
	for _, c := range []*net.UDPConn{near, far} {
		if err := errors.Join(roomy(c), c.SetDeadline(time.Now().Add(stalled))); err != nil {
			return nil, err
		}
	}
	if _, err := near.Write(make([]byte, payload)); err != nil {
		return nil, err
	}
	_, back, err := far.ReadFromUDP(make([]byte, payload))
	if err != nil {
		return nil, err
	}
	// Without an answer each packet would be a new connection's to the host's rules.
	if _, err := far.WriteToUDP(make([]byte, payload), back); err != nil {
		return nil, err
	}
	if _, err := near.Read(make([]byte, payload)); err != nil {
		return nil, err
	}
	f.from, f.to, f.in = near, far, messages(nil)
	if toClient {
		f.from, f.to, f.out = far, near, messages(back)
	} else {
		f.out = messages(nil)
	}
	return f, nil
}

func messages(to net.Addr) []ipv4.Message {
	all := make([]ipv4.Message, batch)
	for i := range all {
		all[i] = ipv4.Message{Buffers: [][]byte{make([]byte, payload)}, Addr: to}
	}
	return all
}

// roomy gives a socket room for what comes while nobody reads it.
func roomy(c syscall.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, room) }); err != nil {
		return err
	}
	return set
}

func (f *flow) send() (int, error)    { return ipv4.NewPacketConn(f.from).WriteBatch(f.out, 0) }
func (f *flow) receive() (int, error) { return ipv4.NewPacketConn(f.to).ReadBatch(f.in, 0) }

// udp measures packets: those that arrive a second while more are sent than can arrive.
func udp(p *path, toClient bool) (_ float64, err error) {
	f, err := newFlow(p, toClient)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Release()) }()
	return stream(func() error { _, err := f.send(); return err }, f.receive)
}

// udpCost measures packets that arrive for each second of the sending thread's processor time. They are sent in bursts that
// the receiving socket has room for, and received between those: whatever else runs on the host, and what it costs to wake a
// receiver, doesn't count.
func udpCost(p *path, toClient bool) (_ float64, err error) {
	f, err := newFlow(p, toClient)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Release()) }()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var spent time.Duration
	arrived := 0
	for began := time.Now(); time.Since(began) < window; {
		sent, took, err := f.burst()
		if err != nil {
			return 0, fmt.Errorf("send: %w", err)
		}
		n, err := f.drain(sent)
		if err != nil {
			return 0, fmt.Errorf("receive: %w", err)
		}
		spent += took
		arrived += n
	}
	return float64(arrived) / spent.Seconds(), nil
}

func (f *flow) burst() (sent int, took time.Duration, err error) {
	began, err := threadTime()
	if err != nil {
		return 0, 0, err
	}
	for range burst {
		n, err := f.send()
		if err != nil {
			return 0, 0, err
		}
		sent += n
	}
	ended, err := threadTime()
	return sent, ended - began, err
}

// drain receives what has been sent, less what doesn't come any more.
func (f *flow) drain(sent int) (arrived int, err error) {
	if err := f.to.SetReadDeadline(time.Now().Add(lost)); err != nil {
		return 0, err
	}
	for arrived < sent {
		n, err := f.receive()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return arrived, nil
		} else if err != nil {
			return 0, err
		}
		arrived += n
	}
	return arrived, nil
}

// threadTime is the processor time that the calling thread has had.
func threadTime() (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0, fmt.Errorf("read the thread's clock: %w", err)
	}
	return time.Duration(t.Nano()), nil
}
