package manager

import (
	"context"
	"fmt"
	"io"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/version"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go/features"
)

// Info describes the runtime.
func (m *Manager) Info(context.Context, io.Reader) (*types.RuntimeInfo, error) {
	no := false
	// containerd asks for one feature and refuses containers that need it where it isn't there.
	f, err := typeurl.MarshalAnyToProto(&features.Features{
		Linux: &features.Linux{MountExtensions: &features.MountExtensions{IDMap: &features.IDMap{Enabled: &no}}},
	})
	if err != nil {
		return nil, fmt.Errorf("describe the features: %w", err)
	}
	return &types.RuntimeInfo{
		Name:     m.Runtime,
		Version:  &types.RuntimeVersion{Version: version.Version, Revision: version.Revision},
		Features: f,
	}, nil
}
