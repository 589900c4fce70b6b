package sandbox

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
)

// The labels by which containerd's garbage collector goes from one thing to the next. It looks at no more than those.
const (
	rootLabel     = "containerd.io/gc.root"
	contentLabel  = "containerd.io/gc.ref.content"
	snapshotLabel = "containerd.io/gc.ref.snapshot." + Snapshotter
)

// Layer is a snapshot of the snapshotter.
type Layer struct {
	Namespace, Key string
	Size           int64 // bytes that come free with it
}

// UnusedLayers lists the snapshots that no image, container or lease needs, in all namespaces: what CollectGarbage removes, as
// far as can be told from outside of containerd.
func (c *Client) UnusedLayers(ctx context.Context) ([]Layer, error) {
	spaces, err := c.ctrd.NamespaceService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	var all []Layer
	for _, ns := range spaces {
		unused, err := c.unusedLayers(namespaces.WithNamespace(ctx, ns), ns)
		if err != nil {
			return nil, fmt.Errorf("look for unused layers in namespace %s: %w", ns, err)
		}
		all = append(all, unused...)
	}
	return all, nil
}

// marking is what is known to be needed, and what follows from that.
type marking struct {
	labels   map[string]map[string]string // of content, by digest
	parents  map[string]string            // of snapshots, by key
	contents map[string]bool              // needed
	layers   map[string]bool
}

func (c *Client) unusedLayers(ctx context.Context, ns string) ([]Layer, error) {
	m := &marking{labels: map[string]map[string]string{}, parents: map[string]string{}, contents: map[string]bool{}, layers: map[string]bool{}}
	store := c.ctrd.SnapshotService(Snapshotter)
	var roots []map[string]string
	// Layers first: one that is made meanwhile isn't among them, and what it needs isn't unused.
	err := store.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		m.parents[info.Name] = info.Parent
		roots = append(roots, rootOf(info.Labels, snapshotLabel, info.Name))
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(m.parents) == 0 {
		return nil, nil
	}
	err = c.ctrd.ContentStore().Walk(ctx, func(info content.Info) error {
		m.labels[info.Digest.String()] = info.Labels
		roots = append(roots, rootOf(info.Labels, contentLabel, info.Digest.String()))
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, labels := range roots {
		m.follow(labels)
	}
	if err := c.markUsers(ctx, m); err != nil {
		return nil, err
	}
	var unused []Layer
	for key := range m.parents {
		if m.layers[key] {
			continue
		}
		usage, err := store.Usage(ctx, key)
		if errdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		unused = append(unused, Layer{Namespace: ns, Key: key, Size: usage.Size})
	}
	return unused, nil
}

// rootOf is a label that leads to the thing itself, if that is needed for its own sake.
func rootOf(labels map[string]string, label, name string) map[string]string {
	if _, ok := labels[rootLabel]; !ok {
		return nil
	}
	return map[string]string{label: name}
}

// markUsers marks what images, containers and leases need.
func (c *Client) markUsers(ctx context.Context, m *marking) error {
	images, err := c.ctrd.ImageService().List(ctx)
	if err != nil {
		return err
	}
	for _, i := range images {
		m.content(i.Target.Digest.String())
		m.follow(i.Labels)
	}
	containers, err := c.ctrd.ContainerService().List(ctx)
	if err != nil {
		return err
	}
	for _, k := range containers {
		if k.Snapshotter == Snapshotter {
			m.layer(k.SnapshotKey)
		}
		m.follow(k.Labels)
	}
	held, err := c.ctrd.LeasesService().List(ctx)
	if err != nil {
		return err
	}
	for _, l := range held {
		resources, err := c.ctrd.LeasesService().ListResources(ctx, l)
		if errdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		for _, r := range resources {
			switch r.Type {
			case "content":
				m.content(r.ID)
			case "snapshots/" + Snapshotter:
				m.layer(r.ID)
			}
		}
	}
	return nil
}

// follow marks what labels lead to. Each may have something behind its name, which keeps it from being another's.
func (m *marking) follow(labels map[string]string) {
	for label, to := range labels {
		switch {
		case isLabel(label, contentLabel):
			m.content(to)
		case isLabel(label, snapshotLabel):
			m.layer(to)
		}
	}
}

func isLabel(label, name string) bool {
	rest, ok := strings.CutPrefix(label, name)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '/')
}

func (m *marking) content(digest string) {
	if !m.contents[digest] {
		m.contents[digest] = true
		m.follow(m.labels[digest])
	}
}

func (m *marking) layer(key string) {
	for key != "" && !m.layers[key] {
		m.layers[key] = true
		key = m.parents[key]
	}
}
