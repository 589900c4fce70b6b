// Command nested does in a privileged container what those need that run containers in it: their network, their disks and
// their devices. Each check prints a line when it has passed; the first that fails ends it.
package main

import (
	"fmt"
	"os"
	"runtime"
)

func main() {
	// Namespaces are the thread's.
	runtime.LockOSThread()
	for _, c := range []struct {
		name string
		run  func() error
	}{
		{"overlay", overlay}, {"fuse", fuse}, {"loop", loop}, {"tun", tun}, {"network", network},
	} {
		if err := c.run(); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", c.name, err)
			os.Exit(1)
		}
		fmt.Println(c.name)
	}
}
