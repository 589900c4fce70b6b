package stack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// listenRetry is how often listenTCP tries: nothing tells when a port becomes free.
const listenRetry = 20 * time.Millisecond

// maxConnections is how many connections the API may have, if the process may have four times as many descriptors.
const maxConnections = 4096

// mostConnections is how many connections the API may have in this process, so that its clients leave it descriptors for all else.
func mostConnections() (int, error) {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return 0, fmt.Errorf("limit of descriptors: %w", err)
	}
	return int(min(files.Cur/4, maxConnections)), nil
}

// listenTCP listens at an address. One that is taken is waited for, as long as ctx goes on: a `cube up` that was killed has
// lost its lock while its sockets are still open, until its last thread and its child between fork and exec have gone.
func listenTCP(ctx context.Context, address string) (net.Listener, error) {
	for {
		l, err := (&net.ListenConfig{}).Listen(context.WithoutCancel(ctx), "tcp", address)
		if !errors.Is(err, unix.EADDRINUSE) {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(listenRetry):
		}
	}
}
