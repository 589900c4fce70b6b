package gateway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
)

// Repair puts in order what isn't as Up left it, by Up's own way, and tells what that was: nothing where all is well, or
// where Down has been. The device may be another one then, with another Index. It may run beside Watch.
func (g *Gateway) Repair(ctx context.Context) (was []string, err error) {
	// Mostly all is well, and nobody has to wait for that to be seen.
	if _, was, err := g.look(); err != nil || len(was) == 0 {
		return nil, err
	}
	unlock, err := lock(ctx, g.cfg)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer unlock()
	rec, was, err := g.look()
	if err != nil || len(was) == 0 {
		return nil, err
	}
	n := &g.cfg.Network
	if err = checkPool(g.h, n); err == nil {
		g.Index, _, err = rec.ensure(g.h, n, g.cfg.NetworkDir())
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(was, "; "), err)
	}
	return was, nil
}

// look says what isn't as Up left it. What an Up of another configuration has made isn't ours to judge.
func (g *Gateway) look() (*record, []string, error) {
	rec, err := readRecord(g.cfg.NetworkDir())
	if err != nil || rec == nil || !sameObjects(&rec.Network, &g.cfg.Network) {
		return nil, nil, err
	}
	was, err := rec.diff(g.h, &g.cfg.Network)
	return rec, was, err
}
