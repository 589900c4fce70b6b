package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/client"
)

func portForwardCommand() *cli.Command {
	return &cli.Command{
		Name:        "port-forward",
		Usage:       "lead ports of 127.0.0.1 to a sandbox's, by the API's key, until it is interrupted",
		ArgsUsage:   "ID [LOCAL:]PORT...",
		Description: "Whatever is spoken there. It prints the addresses when they can be connected to; LOCAL 0 takes any port.",
		Action:      withKey(portForward),
	}
}

// leading is a port here that leads to one there.
type leading struct{ from, to uint16 }

func parseLeading(s string) (leading, error) {
	local, remote, two := strings.Cut(s, ":")
	if !two {
		remote = local
	}
	from, err := strconv.ParseUint(local, 10, 16)
	to, err2 := strconv.ParseUint(remote, 10, 16)
	if err != nil || err2 != nil || to == 0 {
		return leading{}, fmt.Errorf("%q isn't [LOCAL:]PORT, with numbers up to 65535", s)
	}
	return leading{uint16(from), uint16(to)}, nil
}

func portForward(c *cli.Context, api *client.Client) (err error) {
	if c.NArg() < 2 {
		return errors.New("it takes a sandbox and at least one port of it")
	}
	var all []leading
	for _, arg := range c.Args().Tail() {
		l, err := parseLeading(arg)
		if err != nil {
			return err
		}
		all = append(all, l)
	}
	guest, err := api.Enter(c.Context, c.Args().First())
	if err != nil {
		return err
	}
	var listeners undo.Stack
	defer listeners.Run(&err)
	var lines []string
	for _, l := range all {
		listener, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(l.from))))
		if err != nil {
			return err
		}
		listeners.Push(func() error { _ = listener.Close(); return nil })
		lines = append(lines, fmt.Sprintf("%s -> %d", listener.Addr(), l.to))
		go lead(c.Context, listener, guest, l.to, sayTo(c.App.ErrWriter))
	}
	for _, l := range lines {
		fmt.Fprintln(c.App.Writer, l)
	}
	<-c.Context.Done()
	return exitCode(codeInterrupted)
}

// lead takes connections and hands them to the port, until ctx ends. Of one that can't be, it says why.
func lead(ctx context.Context, l net.Listener, guest *client.Guest, port uint16, say func(string)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			there, err := guest.Dial(ctx, port)
			if err != nil {
				_ = c.(*net.TCPConn).SetLinger(0) // a reset: the port isn't there
				_ = c.Close()
				say(fmt.Sprintf("port %d: %v", port, err))
				return
			}
			client.Join(c.(*net.TCPConn), there)
		}()
	}
}
