package probe

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/client"
)

// host has sandboxes whose runs take a second, and a second more for each that there is beyond the third.
type host struct {
	mu     sync.Mutex
	there  int
	made   int
	room   int
	failed int           // which one's runs fail
	first  time.Duration // what the first run of each takes beside
	slow   map[int]int   // how many runs take 20 s more, by how many sandboxes there are
	memory float64
	shared float64 // memory that the first one has be there for all
	busy   float64 // memory that others take while there are four
	io     func(n int) float64
	stuck  bool // kills fail
}

func (h *host) Capacity(context.Context, string) (client.Capacity, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var c client.Capacity
	c.Memory = client.Resource{Total: 1000 << 20, Used: 100<<20 + h.memory*float64(h.there)}
	if h.there > 0 {
		c.Memory.Used += h.shared
	}
	if h.there == 4 {
		c.Memory.Used += h.busy
	}
	c.CPU.Total = 2
	c.Pressure = &client.Pressure{}
	if h.io != nil {
		c.Pressure.IO = h.io(h.there)
	}
	c.Templates = []client.Room{{Count: h.room - h.there, Short: "host_cpu", CPUs: 2, MemoryMB: 404, Profile: "disposable"}}
	return c, nil
}

func (h *host) Make(_ context.Context, _ string, life time.Duration) (Sandbox, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.there == h.room {
		return nil, errdefs.ErrUnavailable.WithMessage("the host has 0 of its 2 CPUs left")
	}
	if life < time.Minute {
		return nil, errors.New("it won't live long enough")
	}
	h.there++
	h.made++
	return &sandbox{host: h, n: h.made}, nil
}

type sandbox struct {
	*host
	n   int
	ran bool
}

func (s *sandbox) Run(ctx context.Context) error {
	s.mu.Lock()
	took := time.Second * time.Duration(max(s.there-3, 0)+1)
	switch {
	case !s.ran:
		took += s.first
	case s.slow[s.there] > 0:
		s.slow[s.there]--
		took += 20 * time.Second
	}
	s.ran = true
	failed := s.failed
	s.mu.Unlock()
	if failed == s.n {
		return errors.New("no luck")
	}
	select {
	case <-time.After(took):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *sandbox) Kill(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stuck {
		return errors.New("it can't be killed")
	}
	s.there--
	return nil
}

func options() Options {
	return Options{Template: "base", Step: 1, Window: 10 * time.Second, Factor: 2.5, Memory: 20, IO: 60, Limit: time.Hour,
		Timeout: func(d time.Duration) time.Duration { return d }, Tell: func(Step) {}}
}

func TestProbe(t *testing.T) {
	for name, tc := range map[string]struct {
		host    *host
		change  func(*Options)
		load    int
		open    bool
		ended   string
		disagrs []string
	}{
		"too slow":       {&host{room: 20, memory: 50 << 20}, nil, 4, false, "with 5 sandboxes 95 of 100 runs take up to 3s, more than 2.5s", []string{"cpu_overcommit = 4.0", "if each of 20"}},
		"slow enough":    {&host{room: 20}, func(o *Options) { o.P95 = 5 * time.Second }, 7, false, "with 8 sandboxes", []string{"20, and 7 carry"}},
		"refused":        {&host{room: 4, memory: 200 << 20}, nil, 4, true, "the host has 0 of its 2 CPUs left", []string{"if each of 4"}},
		"refused amid":   {&host{room: 3}, func(o *Options) { o.Step = 5 }, 3, true, "0 of its 2 CPUs", nil},
		"as many as may": {&host{room: 20}, func(o *Options) { o.Max, o.Step = 3, 2 }, 3, true, "no more than 3", []string{"room for 20, but the probe ended at 3"}},
		"pressed": {&host{room: 20, io: func(n int) float64 { return float64(30 * n) }}, nil, 1, false,
			"with 2 sandboxes something has waited for I/O in 60 %", []string{"1 carry"}},
		"fails":                      {&host{room: 20, failed: 3}, nil, 2, false, "with 3 sandboxes a run has failed: no luck", []string{"2 carry"}},
		"fails at once":              {&host{room: 20, failed: 1}, nil, 0, false, "with 1 sandboxes a run has failed", nil},
		"never ends":                 {&host{room: 200}, func(o *Options) { o.P95, o.Step = time.Hour, 100 }, 1, false, "with 101 sandboxes only ", []string{"1 carry"}},
		"memory":                     {&host{room: 20, memory: 150 << 20}, nil, 4, false, "with 5 sandboxes", []string{"memory for 6 of 150 MiB each"}},
		"shared memory":              {&host{room: 20, memory: 50 << 20, shared: 300 << 20}, nil, 4, false, "with 5 sandboxes", []string{"memory for 12 of 50 MiB each"}},
		"memory that comes and goes": {&host{room: 20, memory: 50 << 20, busy: 200 << 20}, nil, 4, false, "with 5 sandboxes", []string{"carry this load: admission.cpu_overcommit = 4.0"}},
		"slow at first":              {&host{room: 20, first: 20 * time.Second}, nil, 4, false, "with 5 sandboxes", nil},
		"slow for a moment":          {&host{room: 20, slow: map[int]int{2: 4, 4: 8}}, nil, 4, false, "with 5 sandboxes", nil},
		"short windows":              {&host{room: 20}, func(o *Options) { o.Window = 2 * time.Second }, 4, false, "with 5 sandboxes", nil},
		"slow for long":              {&host{room: 20, slow: map[int]int{2: 20}}, nil, 1, false, "with 2 sandboxes 95 of 100 runs take up to 21s", nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := options()
				if tc.change != nil {
					tc.change(&o)
				}
				told := 0
				o.Tell = func(s Step) { told++ }
				h := tc.host
				room := h.room
				r, err := Run(t.Context(), h, o)
				if err != nil {
					t.Fatal(err)
				}
				if r.Load != tc.load || r.Open != tc.open || r.Admission != room || !strings.Contains(r.Ended, tc.ended) || told != len(r.Steps) || r.Short != "host_cpu" || r.Worst != 1 {
					t.Errorf("%+v, %d steps were told", r, told)
				}
				for _, want := range tc.disagrs {
					if !strings.Contains(strings.Join(r.Disagree, "\n"), want) {
						t.Errorf("%q doesn't say %q", r.Disagree, want)
					}
				}
				if len(r.Steps) > 0 && r.Steps[0].Runs < 5 {
					t.Errorf("the bound is of %d runs", r.Steps[0].Runs)
				}
				if h.memory > 0 && (r.PerSandbox != int64(h.memory) || r.Memory != int((900<<20-h.shared)/h.memory)) {
					t.Errorf("%d fit, of %d each", r.Memory, r.PerSandbox)
				}
				if h.there != 0 {
					t.Errorf("%d sandboxes are left", h.there)
				}
			})
		})
	}
}

// TestInterrupted: whatever ends it, nothing is left, or who has asked knows.
func TestInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		h := &host{room: 100}
		o := options()
		o.P95 = time.Hour
		time.AfterFunc(35*time.Second, stop)
		if _, err := Run(ctx, h, o); !errors.Is(err, context.Canceled) || h.made < 3 || h.there != 0 {
			t.Errorf("interrupted: %v, %d of %d are left", err, h.there, h.made)
		}
		o.Limit = 35 * time.Second
		if _, err := Run(t.Context(), h, o); !errdefs.IsDeadlineExceeded(err) || !strings.Contains(err.Error(), "35s") || h.there != 0 {
			t.Errorf("too long: %v, %d are left", err, h.there)
		}
		h.stuck = true
		o = options()
		if _, err := Run(t.Context(), h, o); err == nil || !strings.Contains(err.Error(), "can't be killed") {
			t.Errorf("what is left isn't told: %v", err)
		}
	})
}

func TestCheck(t *testing.T) {
	good := options()
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Options){
		"no step": func(o *Options) { o.Step = 0 }, "less than nothing": func(o *Options) { o.Max = -1 }, "no window": func(o *Options) { o.Window = 0 },
		"no bound": func(o *Options) { o.Factor = 1 }, "before it began": func(o *Options) { o.P95 = -1 }, "pressure": func(o *Options) { o.IO = 101 }, "limit": func(o *Options) { o.Limit = time.Second },
	} {
		o := options()
		change(&o)
		if err := o.Check(); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPercentile(t *testing.T) {
	all := []time.Duration{5, 1, 4, 2, 3}
	for p, want := range map[int]time.Duration{50: 3, 95: 5, 1: 1, 100: 5} {
		if got := percentile(all, p); got != want {
			t.Errorf("p%d is %d, want %d", p, got, want)
		}
	}
	if percentile(nil, 95) != 0 {
		t.Error("there is one of nothing")
	}
}
