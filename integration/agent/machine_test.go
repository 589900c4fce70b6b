// Package agent drives the agent in a real guest: the guest image's kernel in an emulated QEMU, the agent as PID 1, crun.
package agent

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/tsc"
	"github.com/cubesandbox/cube/vmm/qmp"
)

var cfg *config.Config

func TestMain(m *testing.M) {
	var err error
	if cfg, err = config.Load(""); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if artefacts := os.Getenv("CUBE_ARTEFACTS"); artefacts != "" {
		cfg.Artefacts = artefacts
	}
	code := m.Run()
	if shared != nil {
		shared.end()
	}
	os.Exit(code)
}

// contextFor bounds one step of a test.
func contextFor(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout(d))
	t.Cleanup(cancel)
	return ctx
}

// memory is how much a machine has.
const memory = "256M"

// machine is a QEMU without a jail, as small as the agent can be tested with.
type machine struct {
	dir     string
	process *exec.Cmd
	ended   chan struct{}
	console *console
	qmp     *qmp.Client
	channel net.Conn // to the guest's port
	toHost  chan net.Conn
	relayed net.Conn // the session's end of what is relayed to and from it
	session *mux.Session
	agent   api.AgentClient
	stream  uint32
	freezes uint64 // in the session
	lun     int
	disks   []plugged // all that have been plugged in
	read    uint64    // the last event that has been read
}

// console keeps what the guest prints.
type console struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.b.Write(p)
}

func (c *console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.b.String()
}

var (
	sharedOnce sync.Once
	shared     *machine
)

// sharedMachine is the machine that most tests use: they leave it as they found it.
func sharedMachine(t *testing.T) *machine {
	t.Helper()
	sharedOnce.Do(func() { shared = boot(t) })
	if shared == nil {
		t.Skip("no machine; see the first test's reason")
	}
	return shared
}

// boot starts a machine, connects to its agent and gives it an identity.
func boot(t *testing.T, options ...string) *machine {
	t.Helper()
	khz, err := tsc.KHz()
	if err != nil {
		t.Fatal(err)
	}
	guest := cfg.GuestDir()
	if options == nil {
		options = []string{"-object", "memory-backend-memfd,id=mem,size=" + memory}
	}
	m := launch(t, append([]string{
		"-kernel", guest + "/vmlinuz", "-initrd", guest + "/initrd.img",
		"-append", "console=ttyS0 quiet tsc=reliable panic=-1 reboot=t mitigations=off tsc_early_khz=" + strconv.Itoa(khz),
	}, options...))
	m.configure(t)
	return m
}

// launch starts a machine and connects to its agent.
func launch(t *testing.T, options []string) *machine {
	t.Helper()
	guest, qemu := cfg.GuestDir(), cfg.QEMUDir()
	for _, needed := range []string{guest, qemu} {
		if _, err := os.Stat(needed); err != nil {
			t.Skipf("no artefact: %v (make build)", err)
		}
	}
	dir, err := os.MkdirTemp("", "cube-vmtest")
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{dir: dir, ended: make(chan struct{}), console: &console{}, stream: mux.ControlID}
	agent, agentQEMU := socketpair(t)
	control, controlQEMU := socketpair(t)
	modules := fmt.Sprintf(`{"driver":"raw","node-name":"modules","read-only":true,"file":{"driver":"file","filename":%q}}`, guest+"/modules.img")
	lib := func(d string) string { return filepath.Join(qemu, d) }
	m.process = exec.Command(lib("lib64/ld-linux-x86-64.so.2"), append([]string{
		"--library-path", lib("lib/x86_64-linux-gnu") + ":" + lib("usr/lib/x86_64-linux-gnu"), lib("usr/bin/qemu-system-x86_64"),
		"-L", lib("usr/share/qemu"), "-L", lib("usr/share/seabios"),
		"-M", "microvm,memory-backend=mem", "-accel", "tcg,tb-size=32", "-cpu", "max", "-smp", "1", "-m", memory, "-nodefaults", "-no-user-config",
		"-display", "none", "-no-reboot", "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-chardev", "socket,id=qmp,fd=4", "-mon", "chardev=qmp,mode=control",
		"-device", "virtio-serial-device,id=serial0", "-chardev", "socket,id=agent,fd=3",
		"-device", "virtserialport,chardev=agent,name=cube.agent",
		"-device", "virtio-scsi-device,id=scsi0", "-blockdev", modules,
		"-device", "scsi-hd,drive=modules,bus=scsi0.0,lun=0,serial=modules",
	}, options...)...)
	m.process.Env = []string{"QEMU_MODULE_DIR=" + lib("usr/lib/x86_64-linux-gnu/qemu")}
	m.process.ExtraFiles = []*os.File{agentQEMU, controlQEMU}
	m.process.Stdout, m.process.Stderr = m.console, m.console
	m.process.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := m.process.Start(); err != nil {
		t.Fatal(err)
	}
	watch := m.stopwatch(t)
	go func() {
		_ = m.process.Wait()
		close(m.ended)
	}()
	_, _ = agentQEMU.Close(), controlQEMU.Close()
	m.channel, m.qmp = conn(t, agent), qmp.New(conn(t, control).(*net.UnixConn))
	m.lun, m.toHost = 1, make(chan net.Conn, 1)
	go m.relay()
	if err := m.qmp.Open(contextFor(t, 10*time.Second)); err != nil {
		m.fail(t, err)
	}
	m.connect(t)
	watch.log("from QEMU's start to the agent's hello")
	return m
}

// stopwatch measures a step: time, and the CPU time of the machine, which other work on the host doesn't change much.
type stopwatch struct {
	t    *testing.T
	m    *machine
	at   time.Time
	work time.Duration
}

func (m *machine) stopwatch(t *testing.T) *stopwatch {
	return &stopwatch{t: t, m: m, at: time.Now(), work: m.work(t)}
}

func (s *stopwatch) log(what string) {
	s.t.Helper()
	s.t.Logf("%s: %v, CPU %v", what, time.Since(s.at).Round(time.Millisecond), (s.m.work(s.t) - s.work).Round(time.Millisecond))
}

// work is the CPU time that the machine has used.
func (m *machine) work(t *testing.T) time.Duration {
	t.Helper()
	const clockSched = 2 // clock_getcpuclockid(3)
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^m.process.Process.Pid<<3|clockSched), &ts); err != nil {
		t.Fatal(err)
	}
	return time.Duration(ts.Nano())
}

// relay passes what comes from the guest to whichever session there is.
func (m *machine) relay() {
	var to net.Conn
	b := make([]byte, 64<<10)
	for {
		n, err := m.channel.Read(b)
		if err != nil {
			if to != nil {
				_ = to.Close()
			}
			return
		}
		select {
		case to = <-m.toHost:
		default:
		}
		if to != nil {
			_, _ = to.Write(b[:n])
		}
	}
}

// fail ends the test with what the guest has printed.
func (m *machine) fail(t *testing.T, err error) {
	t.Helper()
	text := m.console.String()
	m.end()
	t.Fatalf("%v; console:\n%s", err, text)
}

// connect begins a session. The one before ends without the guest hearing of it.
func (m *machine) connect(t *testing.T) {
	t.Helper()
	if m.relayed != nil {
		_ = m.relayed.Close()
	}
	host, relayed := net.Pipe()
	m.relayed = relayed
	go func() { _, _ = io.Copy(m.channel, relayed) }()
	m.toHost <- relayed
	var err error
	if m.session, err = mux.Connect(contextFor(t, 60*time.Second), host); err != nil {
		m.fail(t, err)
	}
	m.agent = api.NewAgentClient(ttrpc.NewClient(m.session.Control()))
}

func (m *machine) configure(t *testing.T) *api.ConfigureResponse {
	t.Helper()
	r, err := m.agent.Configure(contextFor(t, 10*time.Second), &api.ConfigureRequest{
		UnixNanos: time.Now().UnixNano(), Entropy: make([]byte, 32), Hostname: "guest", SandboxId: "sandbox",
	})
	if err != nil {
		m.fail(t, err)
	}
	return r
}

// end kills the machine.
func (m *machine) end() {
	_ = m.process.Process.Kill()
	<-m.ended
	_ = os.RemoveAll(m.dir)
}

// awaitEnd waits for the machine's own end.
func (m *machine) awaitEnd(t *testing.T) {
	t.Helper()
	select {
	case <-m.ended:
	case <-contextFor(t, 30*time.Second).Done():
		t.Fatalf("the machine didn't end; console:\n%s", m.console)
	}
}

// open opens a stream, on which every wait is bounded.
func (m *machine) open(t *testing.T) (*mux.Stream, uint32) {
	t.Helper()
	m.stream++
	st, err := m.session.Open(m.stream)
	if err != nil {
		t.Fatal(err)
	}
	_ = st.SetDeadline(time.Now().Add(cfg.Timeout(120 * time.Second)))
	return st, m.stream
}

func socketpair(t *testing.T) (ours, theirs *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
}

func conn(t *testing.T, f *os.File) net.Conn {
	t.Helper()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	return c
}
