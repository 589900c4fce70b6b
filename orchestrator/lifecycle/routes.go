package lifecycle

import (
	"context"
	"crypto/sha256"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

// Routes are the ways into the engine's sandboxes.
func (e *Engine) Routes() ingress.Routes { return routes{e} }

type routes struct{ e *Engine }

// Lookup tells the way into a sandbox.
func (r routes) Lookup(_ context.Context, id string) (ingress.Route, error) {
	_, row, err := r.e.find("", id)
	if err != nil {
		return ingress.Route{}, err
	}
	return r.e.route(row), nil
}

// Wake resumes a sandbox for traffic and returns when it can be reached.
func (r routes) Wake(ctx context.Context, id string) (ingress.Route, error) {
	if err := r.e.wake(ctx, id); err != nil {
		return ingress.Route{}, err
	}
	return r.Lookup(ctx, id)
}

func (e *Engine) route(r *row) ingress.Route {
	envd, traffic := e.tokens(r)
	way := ingress.Route{SandboxID: r.ID, Seq: r.seq, State: string(r.State), Addr: r.addr, Epoch: r.Epoch, Secure: r.Secure, EnvdToken: envd,
		AllowPublic: r.public(), MaskHost: r.Network.MaskRequestHost, AutoResume: r.AutoResume && !r.Cold}
	if traffic != "" {
		sum := sha256.Sum256([]byte(traffic))
		way.TrafficToken = sum[:]
	}
	for _, p := range r.Network.HTTPSPorts {
		way.HTTPSPorts = append(way.HTTPSPorts, uint16(p))
	}
	return way
}

// feed is what one who watches hasn't been told yet: which sandboxes have changed, not how often.
type feed struct {
	mu      sync.Mutex
	changed map[string]bool
	more    chan struct{} // has room for one
}

func (f *feed) add(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changed[id] = true
	select {
	case f.more <- struct{}{}:
	default:
	}
}

func (f *feed) take() map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	changed := f.changed
	f.changed = map[string]bool{}
	return changed
}

// Watch tells all ways, and then those that have changed.
func (r routes) Watch(ctx context.Context, each func(ingress.Update) error) error {
	e := r.e
	if err := e.Ready(); err != nil {
		return err
	}
	f := &feed{changed: map[string]bool{}, more: make(chan struct{}, 1)}
	first := ingress.Update{Full: true}
	e.mu.Lock()
	e.feeds[f] = struct{}{}
	for _, b := range e.boxes {
		if row := b.row.Load(); row != nil {
			first.Routes = append(first.Routes, e.route(row))
		}
	}
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.feeds, f)
		e.mu.Unlock()
	}()
	if err := each(first); err != nil {
		return err
	}
	for {
		select {
		case <-f.more:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-e.life.Done():
			return errClosing
		}
		var u ingress.Update
		for id := range f.take() {
			way, err := r.Lookup(ctx, id)
			switch {
			case errdefs.IsNotFound(err):
				u.Gone = append(u.Gone, id)
			case err != nil:
				return err
			default:
				u.Routes = append(u.Routes, way)
			}
		}
		if err := each(u); err != nil {
			return err
		}
	}
}
