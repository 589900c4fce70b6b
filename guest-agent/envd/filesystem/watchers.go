package filesystem

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/api/filesystem"
	"github.com/cubesandbox/cube/guest-agent/envd/keepalive"
	"github.com/cubesandbox/cube/guest-agent/envd/status"
)

// Limits of watchers that are asked now and then.
const (
	maxWatchers = 256
	// maxQueued is how many events wait to be asked for.
	maxQueued = 10_000
	// abandoned is how long after nobody has asked for one it may be ended in favour of another.
	abandoned = 10 * time.Minute
)

// watchRequest is what both ways to watch are asked with.
type watchRequest interface {
	GetPath() string
	GetRecursive() bool
	GetIncludeEntry() bool
	GetAllowNetworkMounts() bool
}

func (s *Service) watch(h http.Header, r watchRequest) (*watch, error) {
	path, _, err := s.resolve(h, r.GetPath())
	if err != nil {
		return nil, err
	}
	return newWatch(s.Settings, options{path, r.GetRecursive(), r.GetIncludeEntry(), r.GetAllowNetworkMounts()})
}

func (s *Service) WatchDir(ctx context.Context, r *connect.Request[filesystem.WatchDirRequest], out *connect.ServerStream[filesystem.WatchDirResponse]) error {
	interval, err := keepalive.Interval(r.Header())
	if err != nil {
		return status.Connect(err)
	}
	w, err := s.watch(r.Header(), r.Msg)
	if err != nil {
		return status.Connect(err)
	}
	defer w.close()
	return status.Connect(stream(ctx, w, interval, out.Send))
}

// stream sends what happens until the directory is gone, events are lost or ctx ends.
func stream(ctx context.Context, w *watch, interval time.Duration, send func(*filesystem.WatchDirResponse) error) error {
	err := send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Start_{Start: &filesystem.WatchDirResponse_Start{}}})
	for err == nil {
		var events []*filesystem.FilesystemEvent
		idle, cancel := context.WithTimeoutCause(ctx, interval, errIdle)
		events, err = w.next(idle)
		cancel()
		for _, e := range events {
			if err := send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Filesystem{Filesystem: e}}); err != nil {
				return err
			}
		}
		if errors.Is(err, errIdle) {
			err = send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Keepalive{Keepalive: &filesystem.WatchDirResponse_KeepAlive{}}})
		}
	}
	if errors.Is(err, errEnded) {
		return nil
	}
	return err
}

var errIdle = errors.New("nothing has happened")

// watchers are those that are asked now and then.
type watchers struct {
	mu  sync.Mutex
	all map[string]*polled
}

// polled is a watcher with the events since it was last asked.
type polled struct {
	stop  context.CancelFunc
	asked time.Time // the last time; watchers.mu guards it

	mu     sync.Mutex
	events []*filesystem.FilesystemEvent
	err    error // a loss, told once, or the end
}

func (s *Service) CreateWatcher(_ context.Context, r *connect.Request[filesystem.CreateWatcherRequest]) (*connect.Response[filesystem.CreateWatcherResponse], error) {
	w, err := s.watch(r.Header(), r.Msg)
	if err != nil {
		return nil, status.Connect(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &polled{stop: cancel}
	id, err := s.watchers.add(p)
	if err != nil {
		cancel()
		w.close()
		return nil, status.Connect(err)
	}
	go func() {
		defer w.close()
		for p.collect(w.next(ctx)) {
		}
	}()
	return connect.NewResponse(&filesystem.CreateWatcherResponse{WatcherId: id}), nil
}

func (ws *watchers) add(p *polled) (id string, err error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if len(ws.all) >= maxWatchers && !ws.endAbandoned() {
		return "", errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf("there are %d watchers; remove one", maxWatchers))
	}
	if ws.all == nil {
		ws.all = map[string]*polled{}
	}
	p.asked = time.Now()
	id = rand.Text()
	ws.all[id] = p
	return id, nil
}

// endAbandoned ends the watcher that nobody has asked for the longest, if that is long: its client has gone without a word.
func (ws *watchers) endAbandoned() bool {
	oldest := ""
	for id, p := range ws.all {
		if oldest == "" || p.asked.Before(ws.all[oldest].asked) {
			oldest = id
		}
	}
	if time.Since(ws.all[oldest].asked) < abandoned {
		return false
	}
	ws.all[oldest].stop()
	delete(ws.all, oldest)
	return true
}

// collect keeps what has happened, and says whether more can happen.
func (p *polled) collect(events []*filesystem.FilesystemEvent, err error) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.events)+len(events) > maxQueued {
		events, err = nil, cmp.Or(err, lost)
	}
	if errdefs.IsDataLoss(err) {
		p.events = nil
	}
	p.events = append(p.events, events...)
	if err != nil {
		p.err = err
	}
	return err == nil || errdefs.IsDataLoss(err)
}

// take returns what has happened. A loss comes before what happened after it, the end last.
func (p *polled) take() (events []*filesystem.FilesystemEvent, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if errdefs.IsDataLoss(p.err) {
		err, p.err = p.err, nil
		return nil, err
	}
	if len(p.events) == 0 {
		return nil, p.err
	}
	events, p.events = p.events, nil
	return events, nil
}

// get finds a watcher, and removes it where it is told to.
func (ws *watchers) get(id string, remove bool) (*polled, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	p, ok := ws.all[id]
	if !ok {
		return nil, errdefs.ErrNotFound.WithMessage("there is no such watcher")
	}
	p.asked = time.Now()
	if remove {
		delete(ws.all, id)
	}
	return p, nil
}

func (s *Service) GetWatcherEvents(_ context.Context, r *connect.Request[filesystem.GetWatcherEventsRequest]) (*connect.Response[filesystem.GetWatcherEventsResponse], error) {
	p, err := s.watchers.get(r.Msg.GetWatcherId(), false)
	if err != nil {
		return nil, status.Connect(err)
	}
	events, err := p.take()
	return connect.NewResponse(&filesystem.GetWatcherEventsResponse{Events: events}), status.Connect(err)
}

func (s *Service) RemoveWatcher(_ context.Context, r *connect.Request[filesystem.RemoveWatcherRequest]) (*connect.Response[filesystem.RemoveWatcherResponse], error) {
	p, err := s.watchers.get(r.Msg.GetWatcherId(), true)
	if err == nil {
		p.stop()
	}
	return connect.NewResponse(&filesystem.RemoveWatcherResponse{}), status.Connect(err)
}
