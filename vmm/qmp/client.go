package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// maxLine bounds one message. The largest that a command of ours is answered with has a few hundred bytes.
	maxLine = 256 << 10
	// maxPending bounds the commands without an answer, those given up included.
	maxPending = 256
	// maxFDs is the kernel's bound on descriptors in one message (SCM_MAX_FD, net/scm.h).
	maxFDs = 253
)

// Client is one session. All methods may be called from many goroutines.
type Client struct {
	conn  *net.UnixConn
	out   chan *request
	hello chan struct{} // closed when the greeting has come
	done  chan struct{}

	mu      sync.Mutex
	nextID  uint64
	pending map[uint64]chan<- message // nil value: its caller has given up
	subs    map[*Subscription]struct{}
	greeted bool
	err     error
}

// request is a command on its way to the writer, which owns fds.
type request struct {
	line []byte
	fds  []int
}

// message is anything QEMU says.
type message struct {
	Greeting json.RawMessage `json:"QMP"`
	ID       *uint64         `json:"id"`
	Return   json.RawMessage `json:"return"`
	Error    *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	Event     string          `json:"event"`
	Data      json.RawMessage `json:"data"`
	Timestamp struct {
		Seconds      int64 `json:"seconds"`
		Microseconds int64 `json:"microseconds"`
	} `json:"timestamp"`
}

// New makes a client of a connected socket, which it owns from then on. Subscribe before Open, to lose no event.
func New(conn *net.UnixConn) *Client {
	c := &Client{
		conn:    conn,
		out:     make(chan *request),
		hello:   make(chan struct{}),
		done:    make(chan struct{}),
		pending: make(map[uint64]chan<- message),
		subs:    make(map[*Subscription]struct{}),
	}
	go c.read()
	go c.write()
	return c
}

// Open waits for QEMU's greeting and leaves the negotiation mode. Until then commands are refused by QEMU.
func (c *Client) Open(ctx context.Context) error {
	select {
	case <-c.hello:
	case <-c.done:
		return fmt.Errorf("wait for the qmp greeting: %w", c.Err())
	case <-ctx.Done():
		return fmt.Errorf("wait for the qmp greeting: %w", ctx.Err())
	}
	return c.Do(ctx, "qmp_capabilities", nil, nil)
}

// Do executes a command. args is marshalled as its arguments, its answer is unmarshalled into out; both may be nil.
// fds travel with it (as SCM_RIGHTS) and stay the caller's. It returns an *Error when QEMU refuses, and ctx's error when
// it has not answered in time: the command may then still be executed.
func (c *Client) Do(ctx context.Context, command string, args, out any, fds ...*os.File) error {
	reply, id, err := c.send(ctx, command, args, fds)
	if err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	var m message
	select {
	case m = <-reply:
	case <-ctx.Done():
		c.abandon(id)
		return fmt.Errorf("qmp %s: no answer: %w", command, ctx.Err())
	case <-c.done:
		select {
		case m = <-reply: // the answer was the last thing QEMU said
		default:
			return fmt.Errorf("qmp %s: %w", command, c.Err())
		}
	}
	if m.Error != nil {
		return &Error{Command: command, Class: m.Error.Class, Desc: m.Error.Desc}
	}
	if out != nil {
		if err := json.Unmarshal(m.Return, out); err != nil {
			return fmt.Errorf("qmp %s: answer: %w", command, err)
		}
	}
	return nil
}

// send registers a waiter and hands the command to the writer.
func (c *Client) send(ctx context.Context, command string, args any, fds []*os.File) (<-chan message, uint64, error) {
	if len(fds) > maxFDs {
		return nil, 0, fmt.Errorf("%d descriptors don't fit into one message", len(fds))
	}
	reply := make(chan message, 1)
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return nil, 0, c.err
	}
	if len(c.pending) >= maxPending {
		c.mu.Unlock()
		return nil, 0, fmt.Errorf("QEMU has left %d commands unanswered", maxPending)
	}
	c.nextID++
	id := c.nextID
	c.pending[id] = reply
	c.mu.Unlock()

	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, args, id})
	r := &request{line: append(line, '\n')}
	if err == nil {
		r.fds, err = duplicate(fds)
	}
	if err != nil {
		c.forget(id)
		return nil, 0, err
	}
	select {
	case c.out <- r:
		return reply, id, nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-c.done:
		err = c.Err()
	}
	r.close()
	c.forget(id)
	return nil, 0, err
}

// duplicate makes descriptors of the request's own, so that a caller who gives up may close its files at any time.
func duplicate(files []*os.File) (_ []int, err error) {
	r := request{}
	for _, f := range files {
		sc, err := f.SyscallConn()
		if err == nil {
			var dup int
			var dupErr error
			err = sc.Control(func(fd uintptr) { dup, dupErr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
			if err = errors.Join(err, dupErr); err == nil {
				r.fds = append(r.fds, dup)
			}
		}
		if err != nil {
			r.close()
			return nil, fmt.Errorf("pass %s: %w", f.Name(), err)
		}
	}
	return r.fds, nil
}

func (r *request) close() {
	for _, fd := range r.fds {
		_ = unix.Close(fd)
	}
	r.fds = nil
}

// forget drops the waiter of a command that was never sent.
func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// abandon leaves a tombstone: the late answer is recognised and thrown away.
func (c *Client) abandon(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.pending[id]; ok {
		c.pending[id] = nil
	}
}

func (c *Client) write() {
	for {
		select {
		case r := <-c.out:
			var oob []byte
			if len(r.fds) > 0 {
				oob = unix.UnixRights(r.fds...)
			}
			n, _, err := c.conn.WriteMsgUnix(r.line, oob, nil)
			r.close()
			if err == nil && n < len(r.line) {
				_, err = c.conn.Write(r.line[n:])
			}
			if err != nil {
				c.fail(fmt.Errorf("%w: write: %w", ErrClosed, err))
				return
			}
		case <-c.done:
			return
		}
	}
}

func (c *Client) read() {
	s := bufio.NewScanner(c.conn)
	s.Buffer(make([]byte, 0, 4096), maxLine)
	for s.Scan() {
		if err := c.receive(s.Bytes()); err != nil {
			c.fail(err)
			return
		}
	}
	switch err := s.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		c.fail(fmt.Errorf("%w: a message of more than %d bytes", ErrProtocol, maxLine))
	case err != nil:
		c.fail(fmt.Errorf("%w: read: %w", ErrClosed, err))
	default:
		c.fail(ErrClosed)
	}
}

// receive handles one line. An error ends the session.
func (c *Client) receive(line []byte) error {
	var m message
	if err := json.Unmarshal(line, &m); err != nil {
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case m.Event != "":
		for s := range c.subs {
			s.offer(m)
		}
	case m.ID != nil:
		w, ok := c.pending[*m.ID]
		if !ok {
			return fmt.Errorf("%w: an answer to command %d, which nobody gave", ErrProtocol, *m.ID)
		}
		delete(c.pending, *m.ID)
		if w != nil {
			w <- m // has room for the one answer
		}
	case m.Greeting != nil:
		if c.greeted {
			return fmt.Errorf("%w: a second greeting", ErrProtocol)
		}
		c.greeted = true
		close(c.hello)
	case m.Error != nil:
		return fmt.Errorf("%w: an error without an id: %s: %s", ErrProtocol, m.Error.Class, m.Error.Desc)
	default:
		return fmt.Errorf("%w: a message that is neither answer nor event", ErrProtocol)
	}
	return nil
}

// fail ends the session with the first error.
func (c *Client) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = err
	_ = c.conn.Close()
	close(c.done)
	for s := range c.subs {
		close(s.c)
	}
	c.subs = nil
}

// Done is closed when the session has ended.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err says why the session ended (ErrClosed, ErrProtocol), nil before.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the session. Idempotent.
func (c *Client) Close() { c.fail(ErrClosed) }
