package pod

import (
	"context"
	"time"
)

// retireLimit is less than containerd gives a shim to shut down (3 s, io.containerd.timeout.shim.shutdown).
const retireLimit = 2 * time.Second

// Retire tells whether the pod is of no use any more: nothing is in it or being made, and no container but the one with
// that id has been announced by a start of the shim. If so, hide is called, which makes the shim unreachable. The pod's
// lock keeps starts away meanwhile: they find the shim either reachable, and in use with that, or on its way out.
func (p *Pod) Retire(ctx context.Context, id string, hide func()) bool {
	if !p.idle() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, retireLimit)
	defer cancel()
	unlock, err := p.env.Dir.Lock(ctx)
	if err != nil {
		p.env.Log.Info("the shim goes on: somebody is starting or ending it", "error", err)
		return false
	}
	defer unlock()
	others, err := p.env.Dir.Others(id)
	if err != nil || len(others) > 0 || !p.idle() {
		return false
	}
	hide()
	return true
}

func (p *Pod) idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.empty()
}

// empty is idle for who has the lock.
func (p *Pod) empty() bool { return len(p.slots) == 0 && p.machine == nil && p.answering == 0 }

// AwaitForgotten is Retire for a shim that nobody tells to end, because whoever was about to is gone: a client that is
// killed takes the calls with it that containerd makes for it. It returns true when the pod has been of no use for the
// limit, false when the shim ends otherwise. Nobody may come to clean up after such a shim, so its records go with it.
func (p *Pod) AwaitForgotten(limit time.Duration, hide func()) bool {
	defer context.AfterFunc(p.ctx, func() {
		p.mu.Lock()
		p.settled.Broadcast()
		p.mu.Unlock()
	})()
	for p.awaitIdle() {
		timer := time.NewTimer(limit)
		select {
		case <-timer.C:
		case <-p.ctx.Done():
			timer.Stop()
			return false
		}
		if p.Retire(p.ctx, "", func() { hide(); p.discard() }) {
			return true
		}
	}
	return false
}

// discard removes the pod's records. Its lock is held, and nobody finds this shim any more.
func (p *Pod) discard() {
	if err := p.env.Dir.Discard(); err != nil {
		p.env.Log.Error("remove the pod's directory", "error", err)
	}
}

// awaitIdle returns false when the shim is ending.
func (p *Pod) awaitIdle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.empty() {
		if p.ctx.Err() != nil {
			return false
		}
		p.settled.Wait()
	}
	return p.ctx.Err() == nil
}
