// Command init is the guest of the VM layer's own tests: a PID 1 that loads the boot modules and obeys lines that come
// over the agent's channel. Each is "<number> <command> [argument…]" and is answered by "<number> ok|error <text>".
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	for _, m := range [][3]string{{"proc", "/proc", "proc"}, {"sys", "/sys", "sysfs"}, {"dev", "/dev", "devtmpfs"}} {
		if err := unix.Mount(m[0], m[1], m[2], 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			fmt.Println("mount", m[1], err)
		}
	}
	if err := loadModules("/etc/cube/boot-modules"); err != nil {
		fmt.Println("load modules:", err)
	}
	port, err := agentPort()
	if err != nil {
		fmt.Println("no agent port:", err)
		select {}
	}
	fmt.Println("test guest is ready")
	for s := bufio.NewScanner(port); ; {
		for s.Scan() {
			id, line, _ := strings.Cut(s.Text(), " ")
			verdict := "ok"
			answer, err := obey(strings.Fields(line))
			if err != nil {
				verdict, answer = "error", err.Error()
			}
			fmt.Fprintf(port, "%s %s %s\n", id, verdict, answer)
		}
		// End of file: nobody is at the other end.
		time.Sleep(10 * time.Millisecond)
		s = bufio.NewScanner(port)
	}
}

func loadModules(list string) error {
	b, err := os.ReadFile(list)
	if err != nil {
		return err
	}
	for _, path := range strings.Fields(string(b)) {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("%s: %w", path, err)
		}
		f.Close()
	}
	return nil
}

// until asks again and again, for what the guest's kernel does in its own time.
func until[T any](ask func() (T, error)) (v T, err error) {
	for range 2000 {
		if v, err = ask(); err == nil {
			return v, nil
		}
		time.Sleep(5 * time.Millisecond)
	}
	return v, err
}

func agentPort() (*os.File, error) {
	return until(func() (*os.File, error) {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, n := range names {
			if b, _ := os.ReadFile(n); strings.TrimSpace(string(b)) == "cube.agent" {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_RDWR, 0)
			}
		}
		return nil, fs.ErrNotExist
	})
}

// findDisk looks for a disk by its serial number, VPD page 0x80.
func findDisk(serial string) (string, error) {
	pages, _ := filepath.Glob("/sys/block/*/device/vpd_pg80")
	for _, p := range pages {
		if b, _ := os.ReadFile(p); len(b) > 4 && strings.TrimSpace(string(b[4:])) == serial {
			return "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(p))), nil
		}
	}
	return "", fmt.Errorf("no disk %s", serial)
}

func obey(args []string) (string, error) {
	if len(args) == 0 {
		return "", errors.New("no command")
	}
	arg := func(n int) string {
		if n < len(args) {
			return args[n]
		}
		return ""
	}
	switch args[0] {
	case "ping":
		return "pong", nil
	case "uptime":
		b, err := os.ReadFile("/proc/uptime")
		return strings.TrimSpace(string(b)), err
	case "memory":
		return proc("/proc/meminfo", "MemTotal:")
	case "cpus":
		b, err := os.ReadFile("/proc/cpuinfo")
		return strconv.Itoa(bytes.Count(b, []byte("processor\t"))), err
	case "nics":
		e, err := os.ReadDir("/sys/class/net")
		return fmt.Sprint(len(e)), err
	case "remember":
		memory = arg(1)
		return "", nil
	case "recall":
		return memory, nil
	case "say":
		fmt.Println(strings.Join(args[1:], " "))
		return "", nil
	case "disk": // <serial>: waits for it; its size in bytes and whether it is read-only
		dev, err := until(func() (string, error) { return findDisk(arg(1)) })
		if err != nil {
			return "", err
		}
		return describe(dev)
	case "nodisk": // <serial>: waits until it is gone
		return until(func() (string, error) {
			if dev, err := findDisk(arg(1)); err == nil {
				return "", fmt.Errorf("%s is still there", dev)
			}
			return "", nil
		})
	case "write": // <serial> <text>
		return onDisk(arg(1), os.O_RDWR|os.O_SYNC, func(f *os.File) (string, error) {
			block := make([]byte, 4096)
			copy(block, arg(2))
			_, err := f.Write(block)
			return "", err
		})
	case "read": // <serial>
		return onDisk(arg(1), os.O_RDONLY, func(f *os.File) (string, error) {
			block := make([]byte, 4096)
			_, err := f.Read(block)
			return string(bytes.TrimRight(block, "\x00")), err
		})
	case "fill": // <serial> <MiB>
		return onDisk(arg(1), os.O_RDWR|os.O_SYNC, func(f *os.File) (string, error) {
			mib, _ := strconv.Atoi(arg(2))
			block := bytes.Repeat([]byte{0xa5}, 1<<20)
			for range mib {
				if _, err := f.Write(block); err != nil {
					return "", err
				}
			}
			return "", nil
		})
	case "trim": // <serial> <MiB>
		return onDisk(arg(1), os.O_RDWR, func(f *os.File) (string, error) {
			mib, _ := strconv.ParseUint(arg(2), 10, 16)
			r := [2]uint64{0, mib << 20}
			_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.BLKDISCARD, pointer(&r))
			if errno != 0 {
				return "", errno
			}
			return "", nil
		})
	case "ext4": // <serial>: mounts it, reads the file "in", writes it to "out", unmounts
		dev, err := until(func() (string, error) { return findDisk(arg(1)) })
		if err != nil {
			return "", err
		}
		return copyInside(dev)
	case "run": // <serial> <program> [argument…]: in a root of its own; the output, quoted
		dev, err := until(func() (string, error) { return findDisk(arg(1)) })
		if err != nil {
			return "", err
		}
		return run(dev, args[2:])
	case "spin": // <threads>: for ever
		n, _ := strconv.Atoi(arg(1))
		for range n {
			go func() {
				for n := int64(0); ; n++ {
					spun.Store(n)
				}
			}()
		}
		return "", nil
	case "hog": // <MiB>: touches that much memory and keeps it
		n, _ := strconv.Atoi(arg(1))
		hoard = append(hoard, bytes.Repeat([]byte{1}, n<<20))
		return "", nil
	case "count": // <serial>: counts for ever, in memory and at the start of the disk
		return "", count(arg(1))
	case "counted": // <n>: waits for more than n; the count in memory and that on the disk
		return counted(arg(1))
	case "twins": // <MiB>: keeps two memories of that size equal, for ever
		n, _ := strconv.Atoi(arg(1))
		go keepTwins(n << 20)
		return "", nil
	case "twinned": // <n>: waits for more than n writes; how many there were, and how often they were found to differ
		return twinned(arg(1))
	case "panic":
		return "", os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0)
	case "poweroff":
		return "", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	case "reboot":
		return "", unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	}
	return "", fmt.Errorf("unknown command %q", args[0])
}

var (
	hoard  [][]byte
	memory string
	spun   atomic.Int64
)

func onDisk(serial string, flags int, do func(*os.File) (string, error)) (string, error) {
	dev, err := until(func() (string, error) { return findDisk(serial) })
	if err != nil {
		return "", err
	}
	f, err := os.OpenFile(dev, flags, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return do(f)
}

func copyInside(dev string) (text string, err error) {
	const dir = "/tmp"
	if err := unix.Mount(dev, dir, "ext4", 0, "discard"); err != nil {
		return "", fmt.Errorf("mount: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Unmount(dir, 0)) }()
	b, err := os.ReadFile(dir + "/in")
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(b)), os.WriteFile(dir+"/out", b, 0o644)
}

func describe(dev string) (string, error) {
	sys := filepath.Join("/sys/block", filepath.Base(dev))
	size, err := os.ReadFile(filepath.Join(sys, "size"))
	if err != nil {
		return "", err
	}
	ro, err := os.ReadFile(filepath.Join(sys, "ro"))
	if err != nil {
		return "", err
	}
	sectors, err := strconv.ParseInt(strings.TrimSpace(string(size)), 10, 64)
	mode := "rw"
	if strings.TrimSpace(string(ro)) == "1" {
		mode = "ro"
	}
	return fmt.Sprintf("%d %s", sectors*512, mode), err
}

func proc(file, key string) (string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	for _, l := range strings.Split(string(b), "\n") {
		if rest, ok := strings.CutPrefix(l, key); ok {
			return strings.TrimSpace(rest), nil
		}
	}
	return "", fmt.Errorf("%s has no %s", file, key)
}
