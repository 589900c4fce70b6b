// Package gate is an SSH server (RFC 4251 to 4254) at the user's end: ssh talks to it by a pipe, and it has a sandbox do what is
// asked for by envd and by the proxy. So ssh, scp and sftp work with sandboxes that have no SSH server, and nothing of SSH goes over
// the network. It decides nothing: who may do what is envd's and the proxy's.
package gate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/orchestrator/client"
)

// DefaultUser is the login name that stands for the sandbox's default user.
const DefaultUser = "default"

// Sandbox is where a gate leads: a client.Guest.
type Sandbox interface {
	Processes(user string) process.ProcessClient
	Dial(ctx context.Context, port uint16) (client.Conn, error)
	// Explain makes an error of Processes one for the user.
	Explain(error) error
}

// Serve lets the client at the other end of the pipe into the sandbox, until it goes. It isn't asked who it is: it has made the
// pipe. Who it says to be is whom of the sandbox's users it wants to be.
func Serve(ctx context.Context, pipe net.Conn, host ssh.Signer, to Sandbox) error {
	config := &ssh.ServerConfig{NoClientAuth: true, ServerVersion: "SSH-2.0-cube"}
	config.AddHostKey(host)
	defer context.AfterFunc(ctx, func() { pipe.Close() })()
	conn, channels, requests, err := ssh.NewServerConn(pipe, config)
	if err != nil {
		if errors.Is(err, io.EOF) {
			return nil // the client has thought better of it
		}
		return fmt.Errorf("ssh: %w", err)
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	g := &gate{to: to, user: conn.User(), ctx: ctx}
	if g.user == DefaultUser {
		g.user = ""
	}
	var open sync.WaitGroup
	open.Go(func() { ssh.DiscardRequests(requests) }) // an answer is all that a client wants that asks whether it is alive
	for c := range channels {
		open.Go(func() { g.open(c) })
	}
	cancel()
	open.Wait()
	return nil
}

type gate struct {
	to   Sandbox
	user string
	// ctx ends with the client.
	ctx context.Context
}

func (g *gate) open(c ssh.NewChannel) {
	switch c.ChannelType() {
	case "session":
		channel, requests, err := c.Accept()
		if err == nil {
			(&session{gate: g, Channel: channel}).serve(requests)
		}
	case "direct-tcpip":
		g.forward(c)
	default:
		_ = c.Reject(ssh.UnknownChannelType, "a sandbox has no channels of type "+c.ChannelType())
	}
}

// direct asks for a connection (RFC 4254, 7.2).
type direct struct {
	Host       string
	Port       uint32
	OriginHost string
	OriginPort uint32
}

// forward connects a channel to a port of the sandbox.
func (g *gate) forward(c ssh.NewChannel) {
	var to direct
	if err := ssh.Unmarshal(c.ExtraData(), &to); err != nil {
		_ = c.Reject(ssh.ConnectionFailed, "the request is malformed")
		return
	}
	switch to.Host {
	case "localhost", "127.0.0.1", "::1":
	default:
		_ = c.Reject(ssh.Prohibited, "only the sandbox's own ports are forwarded to: say localhost")
		return
	}
	if to.Port == 0 || to.Port > 65535 {
		_ = c.Reject(ssh.ConnectionFailed, "there is no such port")
		return
	}
	port, err := g.to.Dial(g.ctx, uint16(to.Port))
	if err != nil {
		_ = c.Reject(ssh.ConnectionFailed, err.Error())
		return
	}
	channel, requests, err := c.Accept()
	if err != nil {
		_ = port.Close()
		return
	}
	go ssh.DiscardRequests(requests)
	client.Join(channel, port)
}

// Pipe is a pair of files as a connection.
type Pipe struct{ In, Out *os.File }

// Read is of net.Conn.
func (p Pipe) Read(b []byte) (int, error) { return p.In.Read(b) }

// Write is of net.Conn.
func (p Pipe) Write(b []byte) (int, error) { return p.Out.Write(b) }

// Close is of net.Conn.
func (p Pipe) Close() error { return errors.Join(p.In.Close(), p.Out.Close()) }

// LocalAddr is of net.Conn.
func (p Pipe) LocalAddr() net.Addr { return pipeAddr{} }

// RemoteAddr is of net.Conn.
func (p Pipe) RemoteAddr() net.Addr { return pipeAddr{} }

// SetDeadline is of net.Conn; the other side of a pipe is trusted to take and give.
func (p Pipe) SetDeadline(time.Time) error { return os.ErrNoDeadline }

// SetReadDeadline is of net.Conn.
func (p Pipe) SetReadDeadline(time.Time) error { return os.ErrNoDeadline }

// SetWriteDeadline is of net.Conn.
func (p Pipe) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe" }
