// Command cube-share serves the files that a container shares with the host, see package shim/share. cube-jail becomes it:
// its argument is the number of shares, directory /i is share i, descriptor 3+i the connection to its client, and the
// next one is where it says that it serves. It ends with the last connection.
package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/shim/share/ninep"
	"github.com/cubesandbox/cube/shim/share/seccomp"
)

const (
	firstFD = 3
	// processors are as many as the helper's CPU time, and one for what the kernel does while others wait for a disk.
	processors = 2
	// memory, and memoryPerShare for the messages, is where the garbage collector begins to work harder. The cgroup allows
	// more.
	memory         = 32 << 20
	memoryPerShare = 2 << 20
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintf(os.Stderr, "cube-share: %v\n", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 || os.Getpid() != 1 {
		return errors.New("refused: cube-share is started by cube, not by hand")
	}
	n, err := strconv.Atoi(os.Args[1])
	if err != nil || n < 1 {
		return fmt.Errorf("%q is not a number of shares", os.Args[1])
	}
	unix.Umask(0) // the client's has been applied
	runtime.GOMAXPROCS(processors)
	debug.SetMemoryLimit(memory + int64(n)*memoryPerShare)
	roots := make([]int, n)
	conns := make([]*os.File, n)
	for i := range n {
		if roots[i], err = unix.Open("/"+strconv.Itoa(i), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
			return fmt.Errorf("open share %d: %w", i, err)
		}
		conns[i] = os.NewFile(uintptr(firstFD+i), fmt.Sprintf("share %d", i))
	}
	if err := seccomp.Install(); err != nil {
		return err
	}
	ready := os.NewFile(uintptr(firstFD+n), "ready")
	if _, err := ready.Write([]byte{1}); err != nil {
		return fmt.Errorf("say that it serves: %w", err)
	}
	if err := ready.Close(); err != nil {
		return err
	}
	var server ninep.Server
	var wg sync.WaitGroup
	for i, conn := range conns {
		wg.Go(func() {
			if err := server.Serve(conn, roots[i]); err != nil {
				fmt.Fprintf(os.Stderr, "share %d: %v\n", i, err)
			}
			_ = conn.Close()
		})
	}
	wg.Wait()
	return nil
}
