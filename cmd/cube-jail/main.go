// Command cube-jail puts itself into a jail and becomes QEMU or cube-share there. Cube starts it for every machine and for
// the files that a container shares with the host; package vmm/jail/enter says what it does. It takes what to do from standard input and ignores its arguments, which only show
// in ps for whom it works.
package main

import (
	"fmt"
	"os"
	"runtime"

	"github.com/cubesandbox/cube/vmm/jail/enter"
)

// Namespaces and credentials belong to threads: everything happens on the main one.
func init() { runtime.LockOSThread() }

func main() {
	spec, err := enter.Read(os.Stdin)
	if err == nil {
		err = enter.Run(spec)
	}
	fmt.Fprintf(os.Stderr, "cube-jail: %v\n", err)
	os.Exit(1)
}
