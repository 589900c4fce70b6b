package config

import (
	"fmt"
	"path/filepath"
	"regexp"
	"runtime"
	"time"

	"github.com/docker/go-units"
)

var registryForm = regexp.MustCompile(`^[a-z0-9.-]+(:[0-9]+)?$|^\[[0-9a-f:]+\](:[0-9]+)?$`)

// Templates is how templates are made.
type Templates struct {
	// Cache bounds what builds keep of their steps for builds to come: the disks as they were then, each counted as far as it differs
	// from the one before. 0 = nothing is kept.
	Cache Size `toml:"cache"`
	// ReadyTimeout is how long what a template runs may take to be ready.
	ReadyTimeout Duration `toml:"ready_timeout"`
	// Concurrency is how many builds go on at once; others wait for their turn.
	Concurrency int `toml:"concurrency"`
	// MaxUpload and Uploads bound one file that a client uploads for a build, and what all of them take.
	MaxUpload Size `toml:"max_upload"`
	Uploads   Size `toml:"uploads"`
	// TrustedRegistries are those whose templates are restored with their memory, and the state of their devices. Of others' nothing is
	// taken but the disk: QEMU isn't made to read state that somebody else has written.
	TrustedRegistries []string `toml:"trusted_registries"`
	// Images lets sandboxes be made of any image, without a template of it.
	Images bool `toml:"images"`
	// PromoteAfter is after how many sandboxes of an image a template is built of it; 0 = never.
	PromoteAfter int `toml:"promote_after"`
}

func defaultTemplates() Templates {
	return Templates{
		Cache: 4 * units.GiB, ReadyTimeout: Duration(5 * time.Minute), Concurrency: max(1, runtime.NumCPU()/2),
		MaxUpload: units.GiB, Uploads: 8 * units.GiB, Images: true, PromoteAfter: 10,
	}
}

func (t *Templates) validate() error {
	switch {
	case time.Duration(t.ReadyTimeout) < time.Second:
		return fmt.Errorf("templates.ready_timeout = %q must be at least a second", time.Duration(t.ReadyTimeout))
	case t.Concurrency < 1:
		return fmt.Errorf("templates.concurrency = %d must be at least 1", t.Concurrency)
	case t.MaxUpload < units.MiB || t.Uploads < t.MaxUpload:
		return fmt.Errorf("templates.max_upload = %s must be at least 1MiB, and templates.uploads = %s as large", t.MaxUpload, t.Uploads)
	case t.PromoteAfter < 0:
		return fmt.Errorf("templates.promote_after = %d must be 0 or more", t.PromoteAfter)
	}
	for _, r := range t.TrustedRegistries {
		if !registryForm.MatchString(r) {
			return fmt.Errorf("templates.trusted_registries: %q must be a registry's host, with its port or not, as names of images have it", r)
		}
	}
	return nil
}

// UploadDir holds what clients have uploaded for builds, by team.
func (c *Config) UploadDir() string { return filepath.Join(c.StateDir, "uploads") }
