package guests

import (
	"context"
	"net"
	"net/netip"
	"strconv"
	"time"
)

// readyAttempt bounds one attempt of a command that may do nothing but wait.
const readyAttempt = 5 * time.Minute

// Until has envd, which has no token, run a command line of the default user's shell again and again until it succeeds, or ctx ends.
func (g *Guests) Until(ctx context.Context, addr netip.Addr, command string) error {
	return g.insist(ctx, readyAttempt, func(ctx context.Context) error {
		_, err := g.Run(ctx, addr, "", command)
		return err
	})
}

// Listens waits until a port of the sandbox takes a connection, or ctx ends.
func (g *Guests) Listens(ctx context.Context, addr netip.Addr, port int) error {
	return g.insist(ctx, attempt, func(ctx context.Context) error {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(addr.String(), strconv.Itoa(port)))
		if err != nil {
			return line(err)
		}
		return c.Close()
	})
}
