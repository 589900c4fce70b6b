package daemon_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/daemon"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testnet"
)

// wait bounds what happens.
const wait = time.Minute

// daemonEnv has the test binary be a daemon with that configuration.
const daemonEnv = "CUBE_TEST_DAEMON"

func TestMain(m *testing.M) {
	if file := os.Getenv(daemonEnv); file != "" {
		if err := run(file); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// run is a daemon's life until SIGTERM.
func run(file string) (err error) {
	cfg, err := config.Load(file)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	d := daemon.New(cfg, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err := os.Remove(cfg.ControlSocket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", cfg.ControlSocket())
	if err != nil {
		return err
	}
	g, running := errgroup.WithContext(ctx)
	srv := &http.Server{Handler: d}
	g.Go(func() error {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		<-running.Done()
		return srv.Close()
	})
	g.Go(func() error {
		if err := d.Up(running); err != nil {
			return err
		}
		fmt.Println(d.Summary())
		return errors.Join(d.Run(running), d.Close())
	})
	return g.Wait()
}

// process is a daemon that runs in a host's namespace.
type process struct {
	*exec.Cmd
	t       *testing.T
	summary string

	mu  sync.Mutex
	log bytes.Buffer
}

// start returns when the daemon is up. The caller is in the host's namespace. more is of the configuration's [network].
func start(t *testing.T, h *testnet.Host, more ...string) *process {
	t.Helper()
	p := launch(t, h, nil, more...)
	if p.summary == "" {
		_ = p.Wait()
		t.Fatalf("the daemon doesn't come up: %s", p.logged())
	}
	return p
}

// launch returns when the daemon is up, with a summary, or has ended. by is a command that runs it.
func launch(t *testing.T, h *testnet.Host, by []string, more ...string) *process {
	t.Helper()
	file := h.Write()
	f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0)
	testnet.Must(t, err)
	_, err = f.WriteString(strings.Join(more, "\n"))
	testnet.Must(t, errors.Join(err, f.Close()))
	self, err := os.Executable()
	testnet.Must(t, err)
	command := append(by, self)
	p := &process{Cmd: exec.Command(command[0], command[1:]...), t: t}
	p.Env = append(os.Environ(), daemonEnv+"="+file)
	p.Stderr = p
	// The signal comes when the thread ends that has started it, which testnet.New has made the test's, clean-ups included.
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.StdoutPipe()
	testnet.Must(t, err)
	testnet.Must(t, p.Start())
	t.Cleanup(p.kill)
	line, _ := bufio.NewReader(out).ReadString('\n')
	p.summary = strings.TrimSpace(line)
	return p
}

// Write takes what the daemon logs.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *process) logged() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// kill leaves it no time. Once it has ended that is nothing.
func (p *process) kill() {
	if p.ProcessState == nil {
		_ = p.Process.Kill()
		_ = p.Wait()
	}
}

// stop ends it in order.
func (p *process) stop() {
	p.t.Helper()
	testnet.Must(p.t, p.Process.Signal(syscall.SIGTERM))
	timer := time.AfterFunc(wait, func() { _ = p.Process.Kill() })
	defer timer.Stop()
	if err := p.Wait(); err != nil {
		p.t.Errorf("the daemon ends with %v: %s", err, p.logged())
	}
}

// until waits for what is to become true.
func (p *process) until(what string, ok func() bool) {
	p.t.Helper()
	for end := time.Now().Add(wait); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("it takes too long until %s; the daemon says: %s", what, p.logged())
		}
	}
}

// box is a pod whose machine is the test.
type box struct {
	*network.Attachment
	h   *testnet.Host
	t   *testing.T
	pod network.Pod
	id  string
	tap *os.File
}

var (
	remote = netip.MustParseAddrPort("1.2.3.4:443")
	all    = &policy.Policy{Default: policy.Direct}
	some   = &policy.Policy{Default: policy.Deny, Rules: []policy.Rule{{Action: policy.Direct, To: "1.2.3.4"}}}
)

// open opens a pod's place and its tap.
func open(t *testing.T, h *testnet.Host, name string, p *policy.Policy) *box {
	t.Helper()
	b := &box{h: h, t: t, pod: network.Pod{Namespace: "default", ID: name}, id: "default-" + name}
	_, err := h.Claim(t.Context(), b.pod)
	testnet.Must(t, err)
	b.Attachment, err = h.Open(t.Context(), network.Request{ID: b.id, Network: "test", IfName: "eth0", Policy: p})
	testnet.Must(t, err)
	b.tap, err = h.OpenTap(t.Context(), b.pod)
	testnet.Must(t, err)
	t.Cleanup(func() { _ = b.tap.Close() })
	return b
}

// close gives all of it back.
func (b *box) close() {
	b.t.Helper()
	testnet.Must(b.t, errors.Join(b.tap.Close(), b.h.Close(b.t.Context(), b.id, "test", "eth0"), b.h.Release(b.t.Context(), b.pod)))
}

// send has the machine send a frame.
func (b *box) send(to netip.AddrPort, payload string) {
	b.t.Helper()
	_, err := b.tap.Write(append(make([]byte, testnet.VnetHeader), testnet.UDP(to, payload)...))
	testnet.Must(b.t, err)
}

// count is how many frames were counted for a reason.
func (b *box) count(r bpf.Reason) uint64 {
	b.t.Helper()
	c, err := b.h.Counters(b.t.Context(), b.id)
	testnet.Must(b.t, err)
	return c[r].Packets
}

// counted says whether what the machine sends now is counted for a reason.
func (b *box) counted(to netip.AddrPort, r bpf.Reason) bool {
	b.t.Helper()
	before := b.count(r)
	b.send(to, "hello")
	return b.count(r) > before
}
