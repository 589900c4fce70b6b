package share

import (
	"context"
	"errors"
	"fmt"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/jail"
)

// Record is what a helper holds on the host. Zero values are things not acquired yet, and the zero Record is no helper.
type Record struct {
	Dir    string     `json:"dir"` // Config.Dir
	UID    uint32     `json:"uid"`
	Cgroup string     `json:"cgroup"` // below cgroup.Parent
	Helper process.ID `json:"helper"`
}

// Cleanup ends what is left of a helper whose Server is gone, and frees what it held. It may be repeated.
func Cleanup(ctx context.Context, cfg *config.Config, r Record) error {
	if r.UID == 0 {
		return nil
	}
	// The uid is free when nothing runs under it any more.
	err := errors.Join(r.Helper.Kill(ctx), cgroup.Remove(ctx, r.Cgroup))
	if err == nil {
		err = jail.NewUIDs(cfg).Release(r.UID, r.Dir)
	}
	if err != nil {
		return fmt.Errorf("clean up after shared files: %w", err)
	}
	return nil
}
