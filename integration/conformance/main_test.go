// Package conformance drives the built shim as containerd does, without containerd: it starts it, calls its services,
// reads its events and cleans up after it. The rows of the table run against two binaries: the real one, with QEMU, and
// one with machines that live in its own process, which shows the shim's own part in seconds.
package conformance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/testnet"
)

// The two sides of the table.
var fakeSide, qemuSide *daemon

func TestMain(m *testing.M) {
	if testnet.IsDaemon() {
		return
	}
	root, err := stack.Repository()
	if err != nil {
		fmt.Println("SKIP:", err)
		return
	}
	if os.Getuid() != 0 {
		fmt.Println("the tests need root: use sudo")
		os.Exit(1)
	}
	os.Exit(run(m, root))
}

func run(m *testing.M, root string) int {
	tools, err := os.MkdirTemp("/var/tmp", "cube-conf-")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer os.RemoveAll(tools)
	fake := filepath.Join(tools, "containerd-shim-fake")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", fake, "./shim/internal/fake/containerd-shim-fake")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Printf("build the shim with fake machines: %v: %s", err, out)
		return 1
	}
	stop := sync.OnceValue(closeAll) // an interrupted test fails, and then both want it
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		fmt.Println("interrupted:", <-interrupted)
		if err := stop(); err != nil {
			fmt.Println(err)
		}
		os.RemoveAll(tools)
		os.Exit(1)
	}()
	code := 1
	if fakeSide, err = newDaemon(fake); err == nil {
		if qemuSide, err = newDaemon(filepath.Join(root, "bin", "containerd-shim-cube-v2")); err == nil {
			code = m.Run()
		}
	}
	if err := errors.Join(err, stop()); err != nil {
		fmt.Println(err)
		return 1
	}
	return code
}

// closeAll ends both sides.
func closeAll() error {
	var errs []error
	for _, d := range []*daemon{fakeSide, qemuSide} {
		if d != nil {
			errs = append(errs, d.close())
		}
	}
	return errors.Join(errs...)
}

func TestFake(t *testing.T) { runTable(t, fakeSide) }

func TestQEMU(t *testing.T) { runTable(t, qemuSide) }
