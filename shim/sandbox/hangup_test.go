package sandbox

import (
	"net"
	"path/filepath"
	"testing"
	"time"
)

func TestAwaitHangup(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var clients []net.Conn
	for range 2 {
		client, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		server, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		clients = append(clients, client)
	}
	const limit = 50 * time.Millisecond
	began := time.Now()
	awaitHangup(socket, limit)
	if took := time.Since(began); took < limit {
		t.Errorf("with clients it took %s, less than the limit", took)
	}
	clients[0].Close()
	done := make(chan struct{})
	go func() {
		awaitHangup(socket, time.Minute)
		close(done)
	}()
	select {
	case <-done:
		t.Error("it didn't wait for the second client")
	case <-time.After(limit):
	}
	clients[1].Close()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Error("it goes on waiting for clients that are gone")
	}
}
