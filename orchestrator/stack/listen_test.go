package stack

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestListenWaitsForTheLastOwner(t *testing.T) {
	last, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := last.Addr().String()
	soon, cancel := context.WithTimeout(t.Context(), 3*listenRetry)
	defer cancel()
	if _, err := listenTCP(soon, address); !errors.Is(err, unix.EADDRINUSE) {
		t.Fatalf("a port that stays taken: %v", err)
	}
	time.AfterFunc(3*listenRetry, func() { _ = last.Close() })
	l, err := listenTCP(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}
