package testnet

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/cni/daemon"
	"github.com/cubesandbox/cube/internal/config"
)

// DaemonEnv has a test's binary, whose TestMain calls IsDaemon, be a daemon with the configuration in that file. It says up when
// it is, and ends with SIGTERM.
const DaemonEnv = "CUBE_TESTNET_DAEMON"

// IsDaemon runs a daemon in a process that was started as one, and tells whether this was one. TestMain calls it first.
func IsDaemon() bool {
	file := os.Getenv(DaemonEnv)
	if file == "" {
		return false
	}
	if err := runDaemon(file); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

func runDaemon(file string) error {
	cfg, err := config.Load(file)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := os.Remove(cfg.ControlSocket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", cfg.ControlSocket())
	if err != nil {
		return err
	}
	d := daemon.New(cfg, slog.New(slog.NewTextHandler(os.Stderr, nil)))
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
		fmt.Println("up")
		return errors.Join(d.Run(running), d.Close())
	})
	return g.Wait()
}

// stopWait bounds how long a daemon may take to stop.
const stopWait = time.Minute

// Daemon starts the network's daemon in the host's namespace, as a process, and returns when it is up, with what stops it: in
// order, or killed. It is killed with the test.
func (h *Host) Daemon() (stop func(kill bool)) {
	h.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), DaemonEnv+"="+h.Write())
	cmd.Stderr = os.Stderr
	// The signal comes when the thread ends that has started it, which New has made the test's, clean-ups included.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	Must(h.t, err)
	Must(h.t, cmd.Start())
	stop = func(kill bool) {
		if cmd.ProcessState != nil {
			return
		}
		if kill {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		timer := time.AfterFunc(stopWait, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		if err := cmd.Wait(); err != nil {
			h.t.Errorf("the daemon ends with %v", err)
		}
	}
	h.t.Cleanup(func() { stop(true) })
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		h.t.Fatal("the daemon doesn't come up")
	}
	return stop
}
