// Command init is PID 1 of a guest that runs test binaries, each line of the plan a command. What it prints of its own is the
// kernel's release, which processors have no ticks, what has failed, and as the last line the exit status.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/boot"
	"github.com/cubesandbox/cube/guest-agent/agent/modules"
)

const plan = "/tests/plan"

func main() {
	if filepath.Base(os.Args[0]) == "modprobe" {
		os.Exit(modules.Modprobe(os.Args[1:]))
	}
	status := 0
	if err := run(); err != nil {
		fmt.Println(err)
		status = 1
	}
	fmt.Println("exit status", status)
	// tcdrain(3): a reset doesn't wait for the serial port.
	if err := unix.IoctlSetInt(int(os.Stdout.Fd()), unix.TCSBRK, 1); err != nil {
		fmt.Println("drain the console:", err)
	}
	// Without a return; the end of PID 1 by an error is the machine's end, too.
	fmt.Println("reset:", unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART))
}

func run() error {
	fatal, failed := boot.Run()
	if err := errors.Join(fatal, failed); err != nil {
		return err
	}
	if err := prepare(); err != nil {
		return err
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	fmt.Println("kernel", unix.ByteSliceToString(u.Release[:]))
	full, err := os.ReadFile("/sys/devices/system/cpu/nohz_full")
	if err != nil {
		return err
	}
	fmt.Printf("without ticks: processor %s", full)
	b, err := os.ReadFile(plan)
	if err != nil {
		return err
	}
	var errs []error
	for line := range strings.Lines(string(b)) {
		args := strings.Fields(line)
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stdout
		if err := cmd.Run(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", args[0], err))
		}
	}
	return errors.Join(errs...)
}

// prepare makes a host of the guest.
func prepare() error {
	// These are loaded by programs on a host (udev, iptables-legacy); all others the kernel asks for itself.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := modules.Load(ctx, "tun", "ip_tables", "nf_conntrack"); err != nil {
		return err
	}
	// The kernel goes by the memory, and a guest has little.
	return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_max", []byte("262144"), 0)
}
