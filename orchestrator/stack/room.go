package stack

import (
	"context"
	"time"

	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/usage"
	"github.com/cubesandbox/cube/vmm/base"
)

// collectTimeout bounds the removal of unused layers, each of which is a file.
const collectTimeout = time.Minute

// makeRoom is asked before a disk is made. What containerd has to remove can't be waited for: containerd waits for this.
func (s *stack) makeRoom(ctx context.Context) error {
	err := base.MakeRoom(ctx, s.cfg, s.Log.With("part", "store"))
	if err != nil {
		select {
		case s.full <- struct{}{}:
		default: // asked for already
		}
	}
	return err
}

// keepRoom removes what an earlier life has left and nobody needs, and then unused layers each time that the store is full.
func (s *stack) keepRoom() {
	log := s.Log.With("part", "store")
	err := usage.Tidy(s.life, s.cfg, log)
	if err == nil {
		err = s.makeRoom(s.life)
	}
	for {
		if err != nil && s.life.Err() == nil {
			log.Warn("make room in the store", "error", err)
		}
		select {
		case <-s.life.Done():
			return
		case <-s.full:
			err = s.collectLayers()
		}
	}
}

func (s *stack) collectLayers() error {
	ctx, cancel := context.WithTimeout(s.life, s.cfg.Timeout(collectTimeout))
	defer cancel()
	c, err := sandbox.Connect(ctx, s.cfg)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.CollectGarbage(ctx)
}
