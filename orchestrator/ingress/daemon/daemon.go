// Package daemon is the process of the data plane: the proxy without privileges, and without anything of the host's but its port,
// its certificate and the way to ask the control plane. It outlives the control plane, and hands its port to its successor.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/ingress"
	"github.com/cubesandbox/cube/orchestrator/ingress/certificate"
	"github.com/cubesandbox/cube/orchestrator/ingress/listen"
	"github.com/cubesandbox/cube/orchestrator/ingress/proxy"
)

const (
	// hello is how long a client may take for each thing that it has to say first.
	hello = 10 * time.Second
	// stopTimeout is how long what is open may go on after SIGTERM. Keepers wait for longer.
	stopTimeout = 5 * time.Second
)

// Descriptors that a keeper hands over.
const (
	fdListener = 3 + iota // listens for clients
	fdControl             // listens for the keeper
	fdReady               // is told that both do
	fdOldLog              // takes what is in the log when that is full
)

// Options are how Run is told of its surroundings.
type Options struct {
	Log *slog.Logger
	// Identity is what the keeper knows this proxy by; "" = there is no keeper, and nothing is handed over.
	Identity string
}

// Run serves until ctx ends, or another proxy does and all that is open here has ended.
func Run(ctx context.Context, cfg *config.Config, o Options) error {
	in, err := inherit(ctx, cfg, &o)
	if err != nil {
		return err
	}
	defer in.close()
	if _, err := os.Stat(cfg.ProxyCertificate()); err != nil {
		return fmt.Errorf("there is no certificate in force: %w; `cube up` sees to it, and starts the proxy", err)
	}
	limit, err := raiseLimit()
	if err != nil {
		return err
	}
	dir, err := confine(cfg.IngressDir(), cfg.ProxyUID())
	if err != nil {
		return fmt.Errorf("give up privileges: %w", err)
	}
	source, err := certificate.NewSource(filepath.Join(dir, filepath.Base(cfg.ProxyCertificate())), o.Log)
	if err != nil {
		return err
	}
	errorLog := slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug) // it is about what clients and sandboxes do
	log.SetOutput(errorLog.Writer())                                // where the HTTP client tells of it

	d := &daemon{
		cfg: cfg, o: o, drain: make(chan struct{}), stop: make(chan struct{}), listener: in.listener,
		proxy: proxy.New(proxy.Options{
			Domain: cfg.Proxy.Name(), API: cfg.API.Listen, Log: o.Log, Scale: cfg.Timeout,
			Routes: &ingress.Client{Socket: filepath.Join(dir, filepath.Base(cfg.RouteSocket()))},
		}),
	}
	// The server has a descriptor of its own: the other one is for the successor, whatever becomes of the server's.
	own, err := dup(in.listener)
	if err != nil {
		return err
	}
	d.server = listen.NewServer(own, listen.Options{TLS: source.Config(), Hello: cfg.Timeout(hello), Max: limit}, d.proxy, errorLog)

	life, end := context.WithCancel(context.WithoutCancel(ctx))
	group, life := errgroup.WithContext(life)
	defer end()
	group.Go(func() error { d.proxy.Run(life); return nil })
	group.Go(func() error { return source.Follow(life) })
	group.Go(func() error {
		if err := d.server.Serve(); err != nil {
			return fmt.Errorf("serve %s: %w", cfg.Proxy.Listen, err)
		}
		return nil
	})
	if in.control != nil {
		srv := &http.Server{Handler: d.handler(life), ReadHeaderTimeout: cfg.Timeout(hello)}
		group.Go(func() error {
			if err := srv.Serve(in.control); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve the keeper: %w", err)
			}
			return nil
		})
		group.Go(func() error {
			<-life.Done()
			return srv.Close()
		})
	}
	if err := in.ready(); err != nil {
		return fmt.Errorf("tell the keeper: %w", err)
	}
	o.Log.Info("serving", "at", own.Addr(), "domain", cfg.Proxy.Name(), "connections", limit)
	d.serve(ctx, life)
	end()
	return errors.Join(d.server.Close(), group.Wait())
}

// daemon is a running Run.
type daemon struct {
	cfg      *config.Config
	o        Options
	proxy    *proxy.Proxy
	server   *listen.Server
	listener *net.TCPListener

	once        sync.Once
	drain, stop chan struct{}
	stopOnce    sync.Once
}

// serve returns when all is said and done: ctx or life have ended and what was open had its time, or it has ended after a drain.
func (d *daemon) serve(ctx, life context.Context) {
	select {
	case <-life.Done():
		return
	case <-ctx.Done():
	case <-d.stop:
	case <-d.drain:
	}
	d.once.Do(func() { close(d.drain) })
	_ = d.listener.Close() // the successor has it, or nobody needs it
	d.o.Log.Info("taking nothing new", "open", d.proxy.Streams())
	left, cancel := context.WithCancel(life)
	defer cancel()
	go func() {
		select {
		case <-ctx.Done():
		case <-d.stop:
		case <-left.Done():
			return
		}
		t := time.NewTimer(d.cfg.Timeout(stopTimeout))
		defer t.Stop()
		select {
		case <-t.C:
			cancel()
		case <-left.Done():
		}
	}()
	err := d.server.Drain(left)
	if err == nil {
		err = d.proxy.Wait(left)
	}
	d.o.Log.Info("ending", "open", d.proxy.Streams(), "error", err)
}

// dup is another descriptor of a listener.
func dup(l *net.TCPListener) (*net.TCPListener, error) {
	f, err := l.File()
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return tcpListener(f)
}

// tcpListener takes a descriptor, of which it makes its own.
func tcpListener(f *os.File) (*net.TCPListener, error) {
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	tl, ok := l.(*net.TCPListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%s is no listener for TCP", l.Addr()), l.Close())
	}
	return tl, nil
}
