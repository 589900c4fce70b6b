package ingress

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// fakeRoutes answers with what a test says.
type fakeRoutes struct {
	lookup, wake func(ctx context.Context, id string) (Route, error)
	watch        func(ctx context.Context, each func(Update) error) error
}

func (f *fakeRoutes) Lookup(ctx context.Context, id string) (Route, error) { return f.lookup(ctx, id) }
func (f *fakeRoutes) Wake(ctx context.Context, id string) (Route, error)   { return f.wake(ctx, id) }
func (f *fakeRoutes) Watch(ctx context.Context, each func(Update) error) error {
	return f.watch(ctx, each)
}

func serve(t *testing.T, routes Routes) (*Client, *http.Server) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: Handler(routes)}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
	return &Client{Socket: socket}, srv
}

var sample = Route{
	SandboxID: "i1", Seq: 7, State: StateRunning, Addr: netip.MustParseAddr("10.200.0.7"), Epoch: "e1", Secure: true, EnvdToken: "secret-of-envd",
	TrafficToken: []byte{1, 2}, MaskHost: "localhost:${PORT}", HTTPSPorts: []uint16{443}, AutoResume: true,
}

func TestAsk(t *testing.T) {
	c, _ := serve(t, &fakeRoutes{
		lookup: func(_ context.Context, id string) (Route, error) {
			if id != "i1" {
				return Route{}, errdefs.ErrNotFound
			}
			return sample, nil
		},
		wake: func(_ context.Context, id string) (Route, error) {
			for class, err := range map[string]error{
				"denied": errdefs.ErrPermissionDenied, "conflict": errdefs.ErrConflict, "precondition": errdefs.ErrFailedPrecondition,
				"full": errdefs.ErrResourceExhausted, "away": errdefs.ErrUnavailable,
			} {
				if id == class {
					return Route{}, err
				}
			}
			return sample, nil
		},
	})
	for _, ask := range []func(context.Context, string) (Route, error){c.Lookup, c.Wake} {
		if r, err := ask(t.Context(), "i1"); err != nil || !reflect.DeepEqual(r, sample) {
			t.Errorf("%+v, %v", r, err)
		}
	}
	if _, err := c.Lookup(t.Context(), "i2"); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	for id, is := range map[string]func(error) bool{
		"denied": errdefs.IsPermissionDenied, "conflict": errdefs.IsConflict, "precondition": errdefs.IsFailedPrecondition,
		"full": errdefs.IsResourceExhausted, "away": errdefs.IsUnavailable,
	} {
		if _, err := c.Wake(t.Context(), id); !is(err) {
			t.Errorf("%s: %v", id, err)
		}
	}
	nobody := &Client{Socket: filepath.Join(t.TempDir(), "s")}
	if _, err := nobody.Lookup(t.Context(), "i1"); !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
	if err := nobody.Watch(t.Context(), nil); !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
}

func TestWatch(t *testing.T) {
	updates := []Update{{Full: true, Routes: []Route{sample}}, {Gone: []string{"i1"}}}
	c, srv := serve(t, &fakeRoutes{watch: func(ctx context.Context, each func(Update) error) error {
		for _, u := range updates {
			if err := each(u); err != nil {
				return err
			}
		}
		<-ctx.Done()
		return ctx.Err()
	}})
	var got []Update
	ctx, cancel := context.WithCancel(t.Context())
	err := c.Watch(ctx, func(u Update) error {
		if got = append(got, u); len(got) == len(updates) {
			cancel()
		}
		return nil
	})
	if !errors.Is(err, context.Canceled) || !reflect.DeepEqual(got, updates) {
		t.Errorf("%+v, %v", got, err)
	}
	stop := errors.New("stop")
	if err := c.Watch(t.Context(), func(Update) error { return stop }); err != stop {
		t.Error(err)
	}
	// The end of the control plane ends it, as something that passes.
	n := 0
	err = c.Watch(t.Context(), func(Update) error {
		if n++; n == len(updates) {
			srv.Close()
		}
		return nil
	})
	if !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
}

func TestTokensAreNotLogged(t *testing.T) {
	if s := sample.LogValue().String(); strings.Contains(s, "secret") {
		t.Error(s)
	}
}
