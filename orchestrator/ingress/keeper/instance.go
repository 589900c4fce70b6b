package keeper

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/ingress/daemon"
)

const socketSuffix = ".sock"

// instance is a proxy's process.
type instance struct {
	client daemon.Client
	// status is what it says; zero where it doesn't answer.
	status daemon.Status
}

// instances finds the proxies there are. It is an error if one doesn't answer.
func instances(ctx context.Context, cfg *config.Config) ([]*instance, error) {
	all, stuck, err := find(ctx, cfg, askTimeout)
	if err == nil && len(stuck) > 0 {
		err = stuck[0].silent()
	}
	return all, err
}

// find finds the proxies there are by their sockets: those that answer within limit and those that don't. It removes those sockets
// that nobody listens at.
func find(ctx context.Context, cfg *config.Config, limit time.Duration) (all, stuck []*instance, err error) {
	entries, err := os.ReadDir(cfg.ProxyDir())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, err
	}
	asked, cancel := context.WithTimeout(ctx, cfg.Timeout(limit))
	defer cancel()
	found := make([]*instance, len(entries))
	var asking sync.WaitGroup
	for i, e := range entries {
		in := &instance{client: daemon.Client{Socket: filepath.Join(cfg.ProxyDir(), e.Name())}}
		asking.Go(func() {
			status, err := in.client.Status(asked)
			if err == nil {
				in.status, found[i] = status, in
				return
			}
			switch knock := knock(in.client.Socket); {
			case errors.Is(knock, unix.ECONNREFUSED):
				_ = os.Remove(in.client.Socket) // another one may have done it
			case asked.Err() != nil && knock == nil, errors.Is(knock, unix.EAGAIN): // as many wait as can
				found[i] = in
			}
		})
	}
	asking.Wait()
	for _, in := range found {
		switch {
		case in == nil:
		case in.status == daemon.Status{}:
			stuck = append(stuck, in)
		default:
			all = append(all, in)
		}
	}
	if len(stuck) > 0 && ctx.Err() != nil { // they may have had less time than limit
		return nil, nil, fmt.Errorf("%w: %w", stuck[0].silent(), ctx.Err())
	}
	return all, stuck, nil
}

func (in *instance) silent() error {
	return fmt.Errorf("the proxy behind %s doesn't answer", in.client.Socket)
}

// knock connects to a socket, and no more.
func knock(socket string) error {
	c, err := net.Dial("unix", socket)
	if err == nil {
		_ = c.Close()
	}
	return err
}

// isDead says whether nobody listens at a socket.
func isDead(socket string) bool { return errors.Is(knock(socket), unix.ECONNREFUSED) }

// makeDirs makes what the proxy and its keeper meet in: the proxy may pass through its own, and reads there what is its group's.
func makeDirs(cfg *config.Config) error {
	for _, dir := range []string{cfg.IngressDir(), cfg.ProxyDir(), cfg.LogDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
	}
	if os.Geteuid() != 0 {
		return nil
	}
	if err := os.Chown(cfg.IngressDir(), 0, int(cfg.ProxyUID())); err != nil {
		return err
	}
	return os.Chmod(cfg.IngressDir(), 0o750) // it is watched, which takes reading
}

// ListenRoutes opens the socket by which the proxy asks the control plane. A stale one is replaced: who calls holds the run
// directory.
func ListenRoutes(cfg *config.Config) (net.Listener, error) {
	if err := makeDirs(cfg); err != nil {
		return nil, err
	}
	path := cfg.RouteSocket()
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen for the proxy: %w", err)
	}
	err = os.Chmod(path, 0o660)
	if err == nil && os.Geteuid() == 0 {
		err = os.Chown(path, 0, int(cfg.ProxyUID()))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen for the proxy: %w", err), l.Close())
	}
	return l, nil
}

// launch starts a proxy on the keeper's port and returns when it serves.
func (k *Keeper) launch(ctx context.Context) (_ *instance, err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()

	socket := filepath.Join(k.cfg.ProxyDir(), strings.ToLower(rand.Text()[:12])+socketSuffix)
	control, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("listen for the proxy's keeper: %w", err)
	}
	u.Push(control.Close)
	control.(*net.UnixListener).SetUnlinkOnClose(false) // it is the proxy's from then on
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(k.cfg.ProxyLog(), os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("the proxy's log: %w", err)
	}
	u.Push(log.Close)
	old, err := os.OpenFile(k.cfg.ProxyLog()+".1", os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("the proxy's log: %w", err)
	}
	u.Push(old.Close)
	ready, tell, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	u.Push(ready.Close)
	pid, err := k.start(control.(*net.UnixListener), log, old, tell)
	err = errors.Join(err, tell.Close())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the proxy: %w", err), os.Remove(socket))
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if p, err := os.FindProcess(pid); err == nil {
			_, _ = p.Wait() // how it ends is in its log
		}
	}()
	stop := context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Now()) })
	defer stop()
	if _, err := io.ReadFull(ready, make([]byte, 1)); err != nil {
		if ctx.Err() != nil {
			_ = unix.Kill(pid, unix.SIGKILL) // it isn't reaped before ended is closed
			<-ended
			err = ctx.Err()
		}
		return nil, errors.Join(fmt.Errorf("the proxy doesn't serve: %w; %s says why", err, k.cfg.ProxyLog()), os.Remove(socket))
	}
	in := &instance{client: daemon.Client{Socket: socket}}
	in.status, err = in.client.Status(ctx)
	return in, err
}

// start runs the proxy's program. It isn't os/exec that does, which would have the port block whoever accepts from it.
func (k *Keeper) start(control *net.UnixListener, log, old, tell *os.File) (pid int, err error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	files := []uintptr{null.Fd(), log.Fd(), log.Fd(), 0, 0, tell.Fd(), old.Fd()}
	start := func() error {
		var serr error
		pid, _, serr = syscall.StartProcess(k.exe, []string{k.exe, "proxy", "--keeper", k.identity}, &syscall.ProcAttr{
			Dir: "/", Env: os.Environ(), Files: files, Sys: &syscall.SysProcAttr{Setsid: true},
		})
		return serr
	}
	return pid, withFD(k.listener, &files[3], func() error { return withFD(control, &files[4], start) })
}

// withFD calls f while to is a listener's descriptor.
func withFD(l syscall.Conn, to *uintptr, f func() error) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	err = raw.Control(func(fd uintptr) {
		*to = fd
		ferr = f()
	})
	return errors.Join(err, ferr)
}

// Stop ends all proxies there are: what is open has a moment to end before. ctx bounds how long they are waited for.
func Stop(ctx context.Context, cfg *config.Config) error {
	all, stuck, err := find(ctx, cfg, askTimeout)
	for _, in := range stuck {
		err = errors.Join(err, in.kill(ctx, cfg))
	}
	for _, in := range all {
		over, lerr := in.client.Life(ctx)
		if lerr == nil {
			lerr = in.client.Stop(ctx)
		}
		switch {
		case lerr != nil && isDead(in.client.Socket):
			_ = os.Remove(in.client.Socket)
			continue
		case lerr != nil:
			err = errors.Join(err, lerr)
			continue
		}
		<-over
		if ctx.Err() != nil {
			err = errors.Join(err, fmt.Errorf("the proxy %d doesn't end", in.status.PID), in.kill(context.WithoutCancel(ctx), cfg))
		}
		_ = os.Remove(in.client.Socket)
	}
	return err
}
