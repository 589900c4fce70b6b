package ports

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/fsnotify/fsnotify"
)

// Config is what a Server is made with.
type Config struct {
	// Lookup says where a sandbox's ports lead; errdefs.ErrNotFound if it has none. The server closes what it returns.
	Lookup func(id string) (*Target, error)
	// IDs are the sandboxes that have ports.
	IDs func() ([]string, error)
	// Dir has the leases' files.
	Dir string
	// Device is the only one by which sandboxes are reached.
	Device string
	// Timeout scales a deadline.
	Timeout func(time.Duration) time.Duration
	Log     *slog.Logger
}

// Server serves ports while Run does. All of its state is Run's, which does one thing after the other.
type Server struct {
	cfg     Config
	calls   chan func()
	changed chan struct{} // has one where leases may have ended or ports become free
	all     map[string][]*mapping
	limit   limit
}

// New does nothing yet.
func New(cfg Config) *Server {
	return &Server{
		cfg: cfg, calls: make(chan func()), changed: make(chan struct{}, 1),
		all: map[string][]*mapping{}, limit: newLimit(maxAll),
	}
}

// Changed has the server try again what it couldn't bind: the host's addresses may be others.
func (s *Server) Changed() {
	select {
	case s.changed <- struct{}{}:
	default: // it is to be done anyway
	}
}

// Run serves all ports that sandboxes have, in the network namespace of the calling goroutine's thread and of the process,
// until ctx ends, which is no error. What can't be bound is logged, and tried again when something changes.
// errdefs.ErrUnavailable if the directory of leases has been removed. It can be called again when it has returned.
func (s *Server) Run(ctx context.Context) (err error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch port mappings: %w", err)
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	if err := w.Add(s.cfg.Dir); err != nil {
		return fmt.Errorf("watch port mappings: %w", err)
	}
	defer s.cutAll()
	if err := s.updateAll(ctx); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case f := <-s.calls:
			f()
		case <-s.changed:
			s.settle(ctx)
		case err := <-w.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return fmt.Errorf("watch port mappings: %w", err)
			}
			s.settle(ctx)
		case e := <-w.Events:
			if !e.Has(fsnotify.Remove) {
				continue
			}
			if e.Name == s.cfg.Dir {
				return fmt.Errorf("the network has been taken down: %w", errdefs.ErrUnavailable)
			}
			s.settle(ctx)
		}
	}
}

// call has Run do f; errdefs.ErrUnavailable if it doesn't get to it.
func (s *Server) call(ctx context.Context, f func()) error {
	done := make(chan struct{})
	select {
	case s.calls <- func() { defer close(done); f() }:
		<-done
		return nil
	case <-ctx.Done(): // who asks has waited long enough
		return fmt.Errorf("port mappings aren't served: %w: %w", ctx.Err(), errdefs.ErrUnavailable)
	}
}

// updateAll serves what there is, as far as it can be had.
func (s *Server) updateAll(ctx context.Context) error {
	ids, err := s.cfg.IDs()
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := s.update(ctx, id); err != nil {
			s.cfg.Log.Error("port mappings aren't served", "sandbox", id, "error", err)
		}
	}
	return nil
}

// update serves what a sandbox has, and nothing else of it.
func (s *Server) update(ctx context.Context, id string) error {
	target, err := s.cfg.Lookup(id)
	if errdefs.IsNotFound(err) {
		target = &Target{}
	} else if err != nil {
		return err
	}
	defer target.Close()
	s.cutEnded() // a port of its may be what another one had
	have := s.all[id]
	have = slices.DeleteFunc(have, func(m *mapping) bool {
		i := slices.IndexFunc(target.Leases, func(l Lease) bool { return l.Port == m.lease.Port })
		if i >= 0 && m.address == target.Address && m.bound() {
			_ = target.Leases[i].File.Close()
			target.Leases = slices.Delete(target.Leases, i, i+1)
			return false
		}
		m.cut()
		return true
	})
	var errs []error
	for _, l := range target.Leases {
		m := &mapping{server: s, lease: l, address: target.Address}
		m.err = m.bind(ctx)
		errs = append(errs, m.err)
		have = append(have, m)
	}
	target.Leases = nil // the mappings'
	s.keep(id, have)
	return errors.Join(errs...)
}

// settle cuts what has ended and tries again what couldn't be bound.
func (s *Server) settle(ctx context.Context) {
	s.cutEnded()
	for id, have := range s.all {
		for _, m := range have {
			if m.bound() {
				continue
			}
			if m.err = m.bind(ctx); m.err == nil {
				s.cfg.Log.Info("a port mapping is served that wasn't", "sandbox", id, "port", m.lease.Port)
			}
		}
	}
}

func (s *Server) cutEnded() {
	for id, have := range s.all {
		s.keep(id, slices.DeleteFunc(have, func(m *mapping) bool {
			if m.lease.held() {
				return false
			}
			m.cut()
			return true
		}))
	}
}

func (s *Server) cutAll() {
	for _, have := range s.all {
		for _, m := range have {
			m.cut()
		}
	}
	clear(s.all)
}

func (s *Server) keep(id string, have []*mapping) {
	if s.all[id] = have; len(have) == 0 {
		delete(s.all, id)
	}
}
