// Package keeper is the control plane's side of the proxy's process: it has one serve, puts another in its place when version or
// configuration are others, and starts it again when it has ended. The proxy doesn't need it: it outlives its keeper, and the
// next one finds it.
package keeper

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/ingress/certificate"
	"github.com/cubesandbox/cube/orchestrator/ingress/daemon"
)

const (
	// askTimeout bounds a question to a proxy, which answers from memory.
	askTimeout = 5 * time.Second
	// hangTimeout is after which a proxy that listens and doesn't answer is taken to be beyond help: all that is open by it is lost.
	hangTimeout = 30 * time.Second
	// A proxy that has ended is started again: at once if it had lived for longer than lastBackoff, else after ever longer waits.
	firstBackoff = 200 * time.Millisecond
	lastBackoff  = 30 * time.Second
)

// Keeper has a proxy serve.
type Keeper struct {
	cfg      *config.Config
	log      *slog.Logger
	exe      string
	identity string
	// listener keeps the port when the proxy ends unasked: clients wait for the next one.
	listener *net.TCPListener
	current  *instance
	cert     *certificate.Keeper
}

// Start has a proxy serve with the configuration, of the executable exe: one that does so already, or a new one, which takes the
// port from the one before, whose streams go on. One that has hung is killed. It returns when the proxy serves. ctx bounds that alone.
func Start(ctx context.Context, cfg *config.Config, exe string, log *slog.Logger) (_ *Keeper, err error) {
	k := &Keeper{cfg: cfg, log: log, exe: exe, cert: certificate.NewKeeper(cfg, log)}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.Close())
		}
	}()
	if k.identity, err = identity(cfg, exe); err != nil {
		return nil, err
	}
	if err := makeDirs(cfg); err != nil {
		return nil, err
	}
	if _, err := k.cert.Put(ctx); err != nil {
		return nil, err
	}
	all, stuck, err := find(ctx, cfg, hangTimeout)
	if err != nil {
		return nil, err
	}
	var before []*instance
	for _, in := range all {
		switch {
		case in.status.Draining:
		case in.status.Identity == k.identity && k.current == nil:
			k.current = in
		default:
			before = append(before, in)
		}
	}
	if err := k.takePort(ctx, before, stuck); err != nil {
		return nil, err
	}
	if k.current == nil {
		if k.current, err = k.launch(ctx); err != nil {
			return nil, err
		}
	}
	for _, in := range before {
		if err := in.client.Drain(ctx); err != nil {
			log.Warn("a proxy before this one doesn't answer", "pid", in.status.PID, "error", err)
		}
	}
	return k, nil
}

// identity names what a proxy is made of.
func identity(cfg *config.Config, exe string) (string, error) {
	f, err := os.Open(exe)
	if err != nil {
		return "", fmt.Errorf("the proxy's program: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("the proxy's program: %w", err)
	}
	err = json.NewEncoder(h).Encode([]any{cfg.Proxy.Listen, cfg.Proxy.Domain, cfg.API.Listen, cfg.TimeoutScale, cfg.LogLevel, cfg.ProxyUID(), cfg.StateDir})
	return hex.EncodeToString(h.Sum(nil)[:12]), err
}

// takePort gets the configured port from a proxy that has it, or opens it. Those that are stuck are ended.
func (k *Keeper) takePort(ctx context.Context, before, stuck []*instance) (err error) {
	have := before
	if k.current != nil {
		have = append([]*instance{k.current}, before...)
	}
	for _, in := range have {
		l, err := in.client.Listener(ctx)
		if err != nil {
			k.log.Warn("a proxy doesn't hand its port over", "pid", in.status.PID, "error", err)
			continue
		}
		// What an unprivileged process has handed over is looked at first.
		if at, err := netip.ParseAddrPort(l.Addr().String()); err == nil && samePort(at, k.cfg.Proxy.Listen) {
			k.listener = l
			break
		}
		_ = l.Close()
	}
	if k.listener == nil && k.current != nil {
		return errors.New("the proxy that serves doesn't hand its port over")
	}
	for _, in := range stuck {
		if err := k.end(ctx, in); err != nil {
			return err
		}
	}
	if k.listener == nil {
		k.listener, err = daemon.Listen(ctx, k.cfg)
	}
	return err
}

// end kills a proxy that is stuck, and takes the port from it, unless there is one already.
func (k *Keeper) end(ctx context.Context, in *instance) error {
	p, err := in.process()
	if err != nil {
		return err
	}
	k.log.Warn("a proxy doesn't answer and is killed, with all that is open by it", "pid", p.PID, "waited", k.cfg.Timeout(hangTimeout))
	if k.listener == nil && p.PID != 0 {
		if k.listener, err = seize(p, k.cfg.Proxy.Listen); err != nil {
			k.log.Warn("who waits for that proxy to accept him has to try again", "error", err)
		}
	}
	return in.kill(ctx, k.cfg)
}

// samePort compares where a listener is with where it should be; 0.0.0.0 and [::] are the same where both can be had.
func samePort(is, want netip.AddrPort) bool {
	if is.Addr().IsUnspecified() && want.Addr().IsUnspecified() {
		return is.Port() == want.Port()
	}
	return is.Addr().Unmap() == want.Addr().Unmap() && is.Port() == want.Port()
}

// Run keeps the proxy and its certificate until ctx ends. What serves then goes on.
func (k *Keeper) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return k.cert.Run(ctx) })
	group.Go(func() error { return k.keep(ctx) })
	return group.Wait()
}

func (k *Keeper) keep(ctx context.Context) error {
	delay := time.Duration(0)
	began := time.Now()
	for {
		if k.current != nil {
			over, err := k.current.client.Life(ctx)
			if err == nil {
				<-over
			}
			if ctx.Err() != nil {
				return nil
			}
			k.log.Error("the proxy has ended", "pid", k.current.status.PID, "log", k.cfg.ProxyLog())
			k.current = nil
		}
		if time.Since(began) > k.cfg.Timeout(lastBackoff) {
			delay = 0
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(delay):
		}
		delay = min(max(2*delay, firstBackoff), lastBackoff)
		began = time.Now()
		lctx, cancel := context.WithTimeout(ctx, k.cfg.Timeout(time.Duration(k.cfg.ReadyTimeout)))
		next, err := k.launch(lctx)
		cancel()
		if err != nil && ctx.Err() == nil {
			k.log.Error("the proxy can't be started", "error", err)
			continue
		}
		k.current = next
	}
}

// Probe asks whether a proxy serves.
func (k *Keeper) Probe(ctx context.Context) error {
	all, stuck, err := find(ctx, k.cfg, askTimeout)
	if err != nil {
		return err
	}
	for _, in := range all {
		if !in.status.Draining {
			return nil
		}
	}
	if len(stuck) > 0 {
		return stuck[0].silent()
	}
	return errors.New("no proxy serves")
}

// Close lets go of the proxy, which goes on.
func (k *Keeper) Close() error {
	if k.listener == nil {
		return nil
	}
	return k.listener.Close()
}
