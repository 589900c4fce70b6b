// Package conformance drives the built shim as containerd does, without containerd: it starts it, calls its services,
// reads its events and cleans up after it. The rows of the table run against two binaries: the real one, with QEMU, and
// one with machines that live in its own process, which shows the shim's own part in seconds.
package conformance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
)

// daemons are the two sides of the table.
var fakeSide, qemuSide *daemon

func TestMain(m *testing.M) {
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
	code := 1
	if fakeSide, err = newDaemon(fake); err == nil {
		if qemuSide, err = newDaemon(filepath.Join(root, "bin", "containerd-shim-cube-v2")); err == nil {
			code = m.Run()
		}
	}
	if err != nil {
		fmt.Println(err)
	}
	for _, d := range []*daemon{fakeSide, qemuSide} {
		if d == nil {
			continue
		}
		if err := d.close(); err != nil {
			fmt.Println(err)
			code = 1
		}
	}
	return code
}

func TestFake(t *testing.T) { runTable(t, fakeSide) }

func TestQEMU(t *testing.T) { runTable(t, qemuSide) }
