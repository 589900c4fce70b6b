// Command call makes the system call of its arguments, the number and four more, under the filter, and then does what
// makes the Go runtime call the kernel. It is a program of its own since the race detector's runtime calls more.
package main

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/shim/share/seccomp"
)

func main() {
	var a [5]uintptr
	for i, s := range os.Args[1:] {
		n, err := strconv.ParseUint(s, 0, 64)
		if err != nil {
			fail(err)
		}
		a[i] = uintptr(n)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		fail(err)
	}
	if err := seccomp.Install(); err != nil {
		fail(err)
	}
	if _, _, errno := unix.RawSyscall6(a[0], a[1], a[2], a[3], a[4], ^uintptr(0), 0); errno != 0 {
		fmt.Println(errno)
	}
	// Threads, timers, the poller, collections.
	done := make(chan bool)
	for range 20 {
		go func() {
			runtime.LockOSThread()
			time.Sleep(time.Millisecond)
			runtime.GC()
			done <- true
		}()
	}
	for range 20 {
		<-done
	}
}

func fail(err error) {
	fmt.Println(err)
	os.Exit(2)
}
