package network

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/base"
)

// sandbox is a machine, restored from a base snapshot, with one container in which commands run.
type sandbox struct {
	cfg     *config.Config
	machine vmm.Machine
	guest   *guest.Guest
	busybox []byte // the program that the container has, a file to send around
	execs   int
}

// card is what the guest is told.
func card(mtu uint32) *api.Network {
	return &api.Network{
		Address: guestIP.String(), Gateway: gateway.String(), GatewayMac: gatewayMAC, Mtu: mtu, Nameservers: []string{gateway.String()},
	}
}

func newSandbox(t *testing.T, cfg *config.Config, tap *os.File, n *api.Network) *sandbox {
	t.Helper()
	s := &sandbox{cfg: cfg}
	root := s.image(t)
	dir := filepath.Join(cfg.VMDir(), "nic")
	must(t, os.MkdirAll(dir, 0o700))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	l := base.NewLauncher(cfg, guest.Settle(cfg.Timeout), log)
	m, err := l.Launch(t.Context(), vmm.Request{ID: "nic", Dir: dir, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}, Tap: tap, Root: root})
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("console:\n%s", m.Console())
		}
		if err := m.Stop(t.Context()); err != nil { // which is over: it ends at once
			t.Error(err)
		}
	})
	s.machine = m
	s.guest, err = guest.Connect(t.Context(), m.Agent(), cfg.Timeout)
	must(t, err)
	t.Cleanup(func() { s.guest.Close() })
	began := time.Now()
	s.configure(t, n)
	t.Logf("configured after %v", time.Since(began).Round(time.Millisecond))
	s.run(t, "box", false)
	return s
}

// configure tells the guest what network it has.
func (s *sandbox) configure(t *testing.T, n *api.Network) {
	t.Helper()
	_, err := s.guest.Identify(t.Context(), "guest", "nic", n)
	must(t, err)
}

// imageSize is the root's.
const imageSize = 16 << 20

// image makes a root with busybox, and with a resolv.conf that leads nowhere, as images of distributions have it.
func (s *sandbox) image(t *testing.T) *os.File {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("busybox is not installed (package busybox-static)")
	}
	s.busybox, err = os.ReadFile(busybox)
	must(t, err)
	root := t.TempDir()
	for _, d := range []string{"bin", "proc", "dev", "etc"} {
		must(t, os.Mkdir(filepath.Join(root, d), 0o755))
	}
	must(t, os.WriteFile(filepath.Join(root, "bin/busybox"), s.busybox, 0o755))
	for _, a := range strings.Fields("sh cat nc ip nslookup sha256sum sleep true") {
		must(t, os.Symlink("busybox", filepath.Join(root, "bin", a)))
	}
	must(t, os.Symlink("../run/systemd/resolve/stub-resolv.conf", filepath.Join(root, "etc/resolv.conf")))
	image := filepath.Join(t.TempDir(), "image")
	if out, err := exec.Command("mkfs.ext4", "-q", "-d", root, image, fmt.Sprintf("%dM", imageSize>>20)).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// run makes a container that waits.
func (s *sandbox) run(t *testing.T, id string, readonly bool) {
	t.Helper()
	spec, err := json.Marshal(&specs.Spec{
		Version: "1.0.2",
		Process: process("sleep", "100000"),
		Root:    &specs.Root{Path: "rootfs", Readonly: readonly},
		Mounts:  []specs.Mount{{Destination: "/proc", Type: "proc", Source: "proc"}},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
			{Type: "pid"}, {Type: "mount"}, {Type: "ipc"}, {Type: "uts"}, {Type: "network"}, {Type: "cgroup"},
		}},
	})
	must(t, err)
	_, err = s.guest.CreateContainer(t.Context(), &api.CreateContainerRequest{
		Id: id, Spec: spec, Rootfs: &api.Rootfs{Disks: []*api.Disk{{Serial: vmm.RootSerial, Fstype: "ext4", Bytes: imageSize}}}, Stdio: &api.Stdio{},
	})
	must(t, err)
	_, err = s.guest.StartContainer(t.Context(), &api.ContainerRequest{Id: id})
	must(t, err)
}

// remove ends a container.
func (s *sandbox) remove(t *testing.T, id string) {
	t.Helper()
	_, err := s.guest.SignalProcess(t.Context(), &api.SignalProcessRequest{Id: id, Signal: 9, All: true})
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), s.cfg.Timeout(time.Minute))
	defer cancel()
	events, err := s.guest.Events(ctx, &api.EventsRequest{})
	must(t, err)
	for {
		e, err := events.Recv()
		must(t, err)
		if exit := e.GetExit(); exit.GetId() == id && exit.GetExecId() == "" {
			break
		}
	}
	_, err = s.guest.DeleteContainer(t.Context(), &api.ContainerRequest{Id: id})
	must(t, err)
}

func process(args ...string) *specs.Process {
	return &specs.Process{Args: args, Cwd: "/", Env: []string{"PATH=/bin"}}
}

// start starts a shell in the container and returns its output.
func (s *sandbox) start(t *testing.T, script string) *mux.Stream {
	t.Helper()
	p, err := json.Marshal(process("sh", "-c", "exec 2>&1; "+script))
	must(t, err)
	out, id, err := s.guest.Open()
	must(t, err)
	must(t, out.SetDeadline(time.Now().Add(s.cfg.Timeout(2*time.Minute))))
	s.execs++
	_, err = s.guest.ExecProcess(t.Context(), &api.ExecProcessRequest{
		Id: "box", ExecId: fmt.Sprint("exec", s.execs), Process: p, Stdio: &api.Stdio{Stdout: id},
	})
	must(t, err)
	return out
}

// sh is what a shell in the container prints.
func (s *sandbox) sh(t *testing.T, script string) string {
	t.Helper()
	b, err := io.ReadAll(s.start(t, script))
	must(t, err)
	return strings.TrimSpace(string(b))
}
