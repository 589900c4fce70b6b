package lifecycle

import (
	"context"
	"crypto/sha256"
	"errors"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/admission"
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
	err := r.e.wake(ctx, id)
	if full := (*admission.Refusal)(nil); errors.As(err, &full) {
		err = errdefs.ErrResourceExhausted.WithMessage(err.Error())
	}
	if err != nil {
		return ingress.Route{}, err
	}
	return r.Lookup(ctx, id)
}

func (e *Engine) route(r *row) ingress.Route {
	envd, traffic := e.tokens(r)
	way := ingress.Route{SandboxID: r.ID, Seq: r.seq, State: string(r.State), Addr: r.addr, Epoch: r.Epoch, Secure: r.Secure, EnvdToken: envd,
		AllowPublic: r.public(), MaskHost: r.Network.MaskRequestHost, AutoResume: r.AutoResume && !r.Cold}
	if r.rewinding {
		way.State = ingress.StateRewinding
	}
	if traffic != "" {
		sum := sha256.Sum256([]byte(traffic))
		way.TrafficToken = sum[:]
	}
	for _, p := range r.Network.HTTPSPorts {
		way.HTTPSPorts = append(way.HTTPSPorts, uint16(p))
	}
	return way
}

// Watch tells all ways, and then those that have changed.
func (r routes) Watch(ctx context.Context, each func(ingress.Update) error) error {
	return r.e.follow(ctx, func(all []*row) error {
		first := ingress.Update{Full: true}
		for _, row := range all {
			first.Routes = append(first.Routes, r.e.route(row))
		}
		return each(first)
	}, func(changed map[string]bool) error {
		var u ingress.Update
		for id := range changed {
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
		return each(u)
	})
}
