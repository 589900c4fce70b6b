package daemon

import (
	"context"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/cni/gateway"
)

// settle is what a change of devices, routes or settings is given to be whole: who turns forwarding off and on again, as
// when all settings are loaded, doesn't mean to have it off.
const settle = 100 * time.Millisecond

// Bounds of the pauses after the network was put in order; they double while it is taken apart again.
const firstPause, lastPause = 200 * time.Millisecond, time.Minute

// manyRounds is how often in a row is no accident.
const manyRounds = 3

// signal has whoever waits at c look, once for any number of changes.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is to be done anyway
	}
}

// watchChanges notices what others change of the gateway.
func (d *Daemon) watchChanges(ctx context.Context) error {
	return gateway.WatchChanges(ctx, d.cfg, func() { signal(d.rules) }, func() { signal(d.rest) })
}

// mend puts in order what others change of the gateway. Without its rules, what comes to an open connection would be
// answered by the host itself, which ends it: that can't wait.
func (d *Daemon) mend(ctx context.Context) error {
	var q quarrel
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.rules:
		case <-d.rest:
			select {
			case <-d.rules:
			case <-time.After(settle):
			}
		}
		was, err := d.putInOrder(ctx)
		if err != nil {
			signal(d.rules)
			return err
		}
		if len(was) == 0 {
			continue
		}
		pause := q.round(time.Now())
		if q.rounds < manyRounds {
			d.log.Warn("somebody has changed the network; it was put in order", "was", strings.Join(was, "; "))
		} else {
			d.log.Error("somebody changes the network again and again, and sandboxes have it at times only: find out who, such as a firewall's service, and stop it",
				"was", strings.Join(was, "; "), "rounds", q.rounds, "pause", pause)
		}
		if !sleep(ctx, pause) {
			return nil
		}
		signal(d.rules) // does it last?
	}
}

// putInOrder tells what had to be.
func (d *Daemon) putInOrder(ctx context.Context) (was []string, err error) {
	if was, err = d.gateway.Repair(ctx); err != nil {
		return nil, err
	}
	err = d.network.CheckGateway(ctx)
	if err == nil || errdefs.IsUnavailable(err) { // where there is no network, none is to be mended
		return was, nil
	} else if !errdefs.IsFailedPrecondition(err) {
		return nil, err
	}
	if len(was) == 0 {
		was = []string{err.Error()}
	}
	// The device is another one, and all programs are to know it.
	datapath, err := d.network.Up(ctx, d.gateway)
	if err != nil {
		return nil, err
	}
	return was, datapath.Close()
}

// quarrel is with somebody who changes what is put in order. Peace is when nothing had to be for as long as lastPause.
type quarrel struct {
	rounds int
	pause  time.Duration
	over   time.Time // when the pause is
}

// round returns the pause after one more.
func (q *quarrel) round(now time.Time) time.Duration {
	if now.Sub(q.over) > lastPause {
		*q = quarrel{}
	}
	q.rounds++
	q.pause = min(max(firstPause, 2*q.pause), lastPause)
	q.over = now.Add(q.pause)
	return q.pause
}
