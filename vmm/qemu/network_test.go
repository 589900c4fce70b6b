package qemu_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm/internal/testguest"
)

// In a network namespace that exists, the machine's tap lives there as long as the machine.
func TestNetNS(t *testing.T) {
	cfg := testguest.Config(t)
	path := newNetNS(t)
	s := restoreSpec(t, cfg, "netns")
	s.NetNS = path
	m, _ := start(t, cfg, s)
	var want, got unix.Stat_t
	if err := unix.Stat(path, &want); err != nil {
		t.Fatal(err)
	}
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/net", m.PID()), &got); err != nil || got.Ino != want.Ino {
		t.Errorf("QEMU is in namespace %d, want %d, %v", got.Ino, want.Ino, err)
	}
	dev := read(t, fmt.Sprintf("/proc/%d/net/dev", m.PID()))
	if !strings.Contains(dev, "tap0:") {
		t.Errorf("no tap:\n%s", dev)
	}
	_ = m.Stop(gone())
	if err := inNetNS(path, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/dev")
		if err == nil && strings.Contains(string(b), "tap0:") {
			err = fmt.Errorf("the tap is left:\n%s", b)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// A machine with a tap from elsewhere is its only user, and nothing else of the tap's namespace is in its reach.
func TestTap(t *testing.T) {
	cfg := testguest.Config(t)
	netns := newNetNS(t)
	f := tap(t, netns, unix.IFF_TAP|unix.IFF_NO_PI|unix.IFF_VNET_HDR)
	s := restoreSpec(t, cfg, "tap")
	s.Tap = f
	m, g := start(t, cfg, s)
	g.Must(t, cfg, "ping")
	if dev := read(t, fmt.Sprintf("/proc/%d/net/dev", m.PID())); strings.Contains(dev, "tap0:") || strings.Contains(dev, "sandbox0:") {
		t.Errorf("QEMU's namespace has more than lo:\n%s", dev)
	}
	// virtio_net_hdr_mrg_rxbuf (virtio 1.2, 5.1.6): what the card in the saved state has, not what QEMU begins with.
	if size, err := unix.IoctlGetInt(int(f.Fd()), unix.TUNGETVNETHDRSZ); size != 12 || err != nil {
		t.Errorf("the header has %d bytes, %v", size, err)
	}
	if got := devices(t, netns)["sandbox0"]; got == nil || got[1] != "0" {
		t.Errorf("the tap's counters are %v: a restored machine has sent something by itself", got)
	}
	f.Close()
	if devices(t, netns)["sandbox0"] == nil {
		t.Error("the machine doesn't hold the tap")
	}
	_ = m.Stop(gone())
	if devices(t, netns)["sandbox0"] != nil {
		t.Error("the tap is left")
	}
}

// devices are the lines of /proc/net/dev by device: received bytes, packets, …
func devices(t testing.TB, netns string) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	if err := inNetNS(netns, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/dev")
		for _, l := range strings.Split(string(b), "\n") {
			if name, counters, ok := strings.Cut(l, ":"); ok {
				found[strings.TrimSpace(name)] = strings.Fields(counters)
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

// newNetNS makes a network namespace that ends with the test, and returns its path.
func newNetNS(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "netns")
	if err := makeNetNS(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

// makeNetNS makes a network namespace that is held by a mount.
func makeNetNS(path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
}

func inNetNS(path string, do func() error) error {
	return onThread(func() error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return do()
	})
}

// onThread calls do on a thread that ends with it.
func onThread(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocks: the thread is spoilt
		done <- do()
	}()
	return <-done
}

// tap makes a tap in a network namespace, and brings it up. It is there until its last descriptor is closed, of which the test has one.
func tap(t testing.TB, netns string, flags uint16) *os.File {
	t.Helper()
	var f *os.File
	if err := inNetNS(netns, func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		f = os.NewFile(uintptr(fd), "tap")
		ifr, err := unix.NewIfreq("sandbox0")
		if err != nil {
			return err
		}
		ifr.SetUint16(flags)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
			return err
		}
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		ifr.SetUint16(unix.IFF_UP)
		return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr)
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}
