// Command cube-agent is the init of a machine's initramfs and, under the name modprobe, the kernel's module loader.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"

	"github.com/cubesandbox/cube/guest-agent/agent"
	"github.com/cubesandbox/cube/guest-agent/agent/modules"
)

func main() {
	if filepath.Base(os.Args[0]) == "modprobe" {
		os.Exit(modules.Modprobe(os.Args[1:]))
	}
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "cube-agent is the init of a virtual machine; it can't be run by hand")
		os.Exit(2)
	}
	// The end of PID 1 is the kernel's panic and the machine's end; what it wrote last is on the console.
	fmt.Fprintln(os.Stderr, "cube-agent:", agent.Run(version()))
	os.Exit(1)
}

// version is this program's, from its build.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return info.Main.Version
}
