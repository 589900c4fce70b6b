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
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/cni/daemon"
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

// start returns when the daemon is up. The caller is in the host's namespace.
func start(t *testing.T, h *testnet.Host) *process {
	t.Helper()
	p := &process{Cmd: exec.Command("/proc/self/exe"), t: t}
	p.Env = append(os.Environ(), daemonEnv+"="+h.Write())
	p.Stderr = p
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.StdoutPipe()
	testnet.Must(t, err)
	testnet.Must(t, p.Start())
	t.Cleanup(p.kill)
	p.summary, err = bufio.NewReader(out).ReadString('\n')
	if err != nil {
		_ = p.Wait()
		t.Fatalf("the daemon doesn't come up: %s", p.logged())
	}
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

// TestStop: a daemon that ends in order leaves all in force.
func TestStop(t *testing.T) {
	h := testnet.New(t)
	p := start(t, h)
	testnet.Must(t, h.Status(t.Context()))
	p.until("taps are ready", func() bool {
		free, err := os.ReadDir(h.Path("free"))
		testnet.Must(t, err)
		return len(free) == h.Config.Network.WarmTaps
	})
	p.stop()
	testnet.Must(t, h.Status(t.Context()))
}
