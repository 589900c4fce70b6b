package lifecycle

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/cubesandbox/cube/orchestrator/db"
)

func (h *host) at(addr netip.Addr) *machine {
	for _, m := range h.machines {
		if m.state == Runs && m.addr == addr && !m.held && !m.half {
			return m
		}
	}
	return nil
}

func (h *host) guest(ctx context.Context, call string, addr netip.Addr, done func(*machine)) error {
	return h.do(ctx, call, addr.String(), func() error {
		m := h.at(addr)
		if m == nil {
			return errors.New("nothing answers there")
		}
		done(m)
		return nil
	})
}

func (h *host) Init(ctx context.Context, addr netip.Addr, i Init) error {
	return h.guest(ctx, "init", addr, func(m *machine) { m.told = append(m.told, i) })
}

// line is one to a machine, whoever has its address.
type line struct {
	h *host
	m *machine
}

func (h *host) Line(ctx context.Context, addr netip.Addr) (l Line, err error) {
	err = h.guest(ctx, "line", addr, func(m *machine) { l = &line{h, m} })
	return l, err
}

// Init is heard when the machine goes on.
func (l *line) Init(ctx context.Context, i Init) error {
	return l.h.do(ctx, "tell", "line to "+i.SandboxID, func() error {
		for l.m.held && !l.m.half && ctx.Err() == nil {
			l.h.mu.Unlock()
			time.Sleep(time.Millisecond)
			l.h.mu.Lock()
		}
		if l.m.half || l.m.held || l.m != l.h.at(l.m.addr) {
			return errors.New("the line is dead")
		}
		l.m.told = append(l.m.told, i)
		return nil
	})
}

func (*line) Close() error { return nil }

func (h *host) Hook(ctx context.Context, addr netip.Addr, _ db.Hook, _ string, b HookBody) error {
	return h.guest(ctx, "hook", addr, func(m *machine) { m.hooked = append(m.hooked, b) })
}

func (h *host) Start(ctx context.Context, addr netip.Addr, _, command string) error {
	return h.guest(ctx, "start", addr, func(m *machine) { m.started = append(m.started, command) })
}

// Exec runs "until killed", which has no end, or what else there is: it says what it is told, and is done.
func (h *host) Exec(ctx context.Context, addr netip.Addr, _, line string, out func(Output)) (Exit, error) {
	err := h.guest(ctx, "exec", addr, func(m *machine) { m.started = append(m.started, line) })
	if err == nil && line == "until killed" {
		<-ctx.Done()
		return Exit{}, ctx.Err()
	}
	out(Output{Bytes: []byte(line)})
	return Exit{}, err
}

func (h *host) Version(ctx context.Context, addr netip.Addr) (string, error) {
	return "0.6.13", h.guest(ctx, "version", addr, func(*machine) {})
}

func (h *host) Metrics(ctx context.Context, addr netip.Addr, _ string) (Metric, error) {
	return Metric{At: time.Now(), CPUs: 2}, h.guest(ctx, "metrics", addr, func(*machine) {})
}
