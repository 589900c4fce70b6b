package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/ingress"
	"github.com/cubesandbox/cube/orchestrator/ingress/keeper"
)

const (
	// transferSize is what is sent each way, in bytes.
	transferSize = 100e6
	// ingressID is the sandbox that the proxy is asked for.
	ingressID = "ibench"
	// requestsEach small requests are asked for each figure.
	requestsEach = 200
)

// ingresses measures the proxy itself: a server on this host instead of one in a sandbox, asked through it and directly.
func ingresses(ctx context.Context, root string, n int) (err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	cfg, err := ingressConfig(&u)
	if err != nil {
		return err
	}
	direct, err := transferServer(&u)
	if err != nil {
		return err
	}
	l, err := keeper.ListenRoutes(cfg)
	if err != nil {
		return err
	}
	routes := &http.Server{Handler: ingress.Handler(oneRoute{SandboxID: ingressID, State: ingress.StateRunning, Addr: direct.Addr(), Epoch: "1", AllowPublic: true})}
	go routes.Serve(l)
	u.Push(routes.Close)
	k, err := keeper.Start(ctx, cfg, filepath.Join(root, "bin", "cube"), slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		return err
	}
	u.Push(func() error { return errors.Join(k.Close(), keeper.Stop(context.WithoutCancel(ctx), cfg)) })

	ways := []*way{{at: direct.String(), host: direct.String()}, {at: cfg.Proxy.Listen.String(), host: fmt.Sprintf("%d-%s.%s", direct.Port(), ingressID, cfg.Proxy.Name())}}
	for range n { // in turn, so that both have the same conditions
		for _, w := range ways {
			if err := w.measure(ctx); err != nil {
				return err
			}
		}
	}
	fmt.Printf("\n## Into a sandbox: the proxy itself\n\nA server on this host, asked directly and through the proxy; medians of %d.\n\n", n)
	fmt.Printf("| | direct | by the proxy | ratio |\n| --- | --- | --- | --- |\n")
	for _, row := range []struct {
		name string
		of   func(*way) sample
	}{{"100 MB down", func(w *way) sample { return w.down }}, {"100 MB up", func(w *way) sample { return w.up }}} {
		d, p := row.of(ways[0]).quantile(.5), row.of(ways[1]).quantile(.5)
		fmt.Printf("| %s | %.0f MB/s | %.0f MB/s | %.2f |\n", row.name, 100/d.Seconds(), 100/p.Seconds(), d.Seconds()/p.Seconds())
	}
	d, p := ways[0].request.quantile(.5), ways[1].request.quantile(.5)
	fmt.Printf("| a small request | %.2f ms | %.2f ms | + %.2f ms |\n", ms(d), ms(p), ms(p-d))
	return nil
}

// ingressConfig is of a proxy of the benchmark's own.
func ingressConfig(u *undo.Stack) (*config.Config, error) {
	dir, err := os.MkdirTemp("", "cube-bench-")
	if err != nil {
		return nil, err
	}
	u.Push(func() error { return os.RemoveAll(dir) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "config.toml")
	text := fmt.Sprintf("state_dir = %q\nrun_dir = %q\nlog_level = 'warn'\n[proxy]\nlisten = %q\n", dir+"/state", dir+"/run", l.Addr())
	if err := errors.Join(l.Close(), os.WriteFile(file, []byte(text), 0o600), os.Setenv(config.FileEnv, file)); err != nil {
		return nil, err
	}
	return config.Load(file)
}

// transferServer sends and takes as much as it is asked for.
func transferServer(u *undo.Stack) (netip.AddrPort, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return netip.AddrPort{}, err
	}
	block := make([]byte, 64<<10)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/down":
			for sent := 0; sent < transferSize; sent += len(block) {
				if _, err := w.Write(block[:min(len(block), transferSize-sent)]); err != nil {
					return
				}
			}
		case "/up":
			_, _ = io.Copy(io.Discard, r.Body)
		}
	})}
	go srv.Serve(l)
	u.Push(srv.Close)
	return netip.MustParseAddrPort(l.Addr().String()), nil
}

// way is one to the server.
type way struct {
	at, host          string
	down, up, request sample
}

func (w *way) measure(ctx context.Context) error {
	var d net.Dialer
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "tcp", w.at) }}}
	defer client.CloseIdleConnections()
	once := func(method, path string, body io.Reader) (time.Duration, error) {
		req, err := http.NewRequestWithContext(ctx, method, "http://"+w.host+path, body)
		if err != nil {
			return 0, err
		}
		began := time.Now()
		resp, err := client.Do(req)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			return 0, fmt.Errorf("%s %s: %s: %w", method, path, resp.Status, err)
		}
		return time.Since(began), nil
	}
	down, err := once(http.MethodGet, "/down", nil)
	if err != nil {
		return err
	}
	up, err := once(http.MethodPost, "/up", io.LimitReader(zeros{}, transferSize))
	if err != nil {
		return err
	}
	w.down, w.up = append(w.down, down), append(w.up, up)
	for range requestsEach {
		took, err := once(http.MethodGet, "/", nil)
		if err != nil {
			return err
		}
		w.request = append(w.request, took)
	}
	return nil
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// oneRoute is a control plane with one sandbox.
type oneRoute ingress.Route

func (o oneRoute) Lookup(_ context.Context, id string) (ingress.Route, error) {
	if id != o.SandboxID {
		return ingress.Route{}, errdefs.ErrNotFound
	}
	return ingress.Route(o), nil
}

func (o oneRoute) Wake(ctx context.Context, id string) (ingress.Route, error) {
	return o.Lookup(ctx, id)
}

func (o oneRoute) Watch(ctx context.Context, each func(ingress.Update) error) error {
	if err := each(ingress.Update{Full: true, Routes: []ingress.Route{ingress.Route(o)}}); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}
