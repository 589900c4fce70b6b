package image

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"
)

// MinSize and MaxSize bound a root disk. Every disk can be grown up to MaxSize while it is mounted, since Format
// reserves room for the block group descriptors of that many blocks.
const (
	MinSize int64 = 64 * units.MiB
	MaxSize int64 = units.TiB
)

// blockSize is ext4's, in bytes.
const blockSize = 4096

// FormatVersion names what Format makes. It changes with the options, so that images of an older kind are found out.
const FormatVersion = "ext4-1"

// features are spelled out so that /etc/mke2fs.conf has no say. All of them are in Linux 5.10 and later.
var features = []string{
	"has_journal", "ext_attr", "resize_inode", "dir_index", "filetype", "extent", "64bit", "flex_bg", "sparse_super",
	"large_file", "huge_file", "dir_nlink", "extra_isize", "metadata_csum",
}

// Format makes the file an image of size bytes with an empty file system: no lost+found, no reserved blocks. It stays
// below 1 MiB for a disk of 10 GiB, because everything that may be zero is a hole and is known to be zeroed, so
// that no kernel writes inode tables or the journal in the background.
func Format(ctx context.Context, path string, size int64) error {
	if err := os.Truncate(path, size); err != nil {
		return err
	}
	journal := 16 // MiB; written space counts in every clone, so it is as small as throughput allows
	if size < units.GiB {
		journal = 4 // MiB, the least that mke2fs makes with 4 KiB blocks
	}
	extended := "lazy_itable_init=1,assume_storage_prezeroed=1,nodiscard,root_owner=0:0"
	if size < MaxSize {
		extended += ",resize=" + strconv.FormatInt(MaxSize/blockSize, 10)
	}
	_, err := run(ctx, "mkfs.ext4", "-q", "-F", "-b", strconv.Itoa(blockSize), "-I", "256", "-i", "16384", "-m", "0",
		"-O", "none,"+strings.Join(features, ","), "-J", "size="+strconv.Itoa(journal), "-E", extended, path)
	if err != nil {
		return err
	}
	// An image layer brings its own directories; e2fsck makes a lost+found should it need one.
	stderr, err := run(ctx, "debugfs", "-w", "-R", "rmdir /lost+found", path)
	if err != nil {
		return err
	}
	// debugfs ends 0 whatever happened; beyond its version it says something only when it failed.
	for line := range strings.Lines(stderr) {
		if !strings.HasPrefix(line, "debugfs 1.") {
			return fmt.Errorf("debugfs: %s", strings.TrimSpace(line))
		}
	}
	return nil
}

// run runs one of e2fsprogs' tools and returns what it wrote to stderr.
func run(ctx context.Context, name string, args ...string) (stderr string, err error) {
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stderr = &out
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	err = cmd.Run()
	switch {
	case err != nil && strings.Contains(out.String(), "No space left on device"):
		return "", fmt.Errorf("%s: %w", name, unix.ENOSPC)
	case errors.Is(err, exec.ErrNotFound):
		return "", fmt.Errorf("%s is missing: install e2fsprogs (1.47 or later)", name)
	case err != nil:
		return "", fmt.Errorf("%s: %w: %s", name, err, strings.Join(strings.Fields(out.String()), " "))
	}
	return out.String(), nil
}

// Where ext4's superblock is and what it says, from the kernel's Documentation/filesystems/ext4/super.rst.
const (
	superOffset     = 1024
	superMagic      = 0x38
	superState      = 0x3a
	superIncompat   = 0x60
	ext4Magic       = 0xef53
	stateErrors     = 0x2 // the kernel met an error
	incompatRecover = 0x4 // mounted, or not unmounted cleanly: the journal must be replayed
)

// ErrNotClean is an image whose file system can't be read without replaying its journal, or is damaged.
var ErrNotClean = errors.New("file system is not clean")

// CheckClean tells whether the file system was unmounted in order and without an error. Only for images that no guest
// has written: what a guest's superblock says is worth nothing.
func CheckClean(f *os.File) error {
	var sb [superIncompat + 4]byte
	if _, err := f.ReadAt(sb[:], superOffset); err != nil {
		return fmt.Errorf("read superblock: %w", err)
	}
	le := binary.LittleEndian
	switch {
	case le.Uint16(sb[superMagic:]) != ext4Magic:
		return fmt.Errorf("%w: no ext4 superblock", ErrNotClean)
	case le.Uint16(sb[superState:])&stateErrors != 0:
		return fmt.Errorf("%w: the kernel met an error while writing it", ErrNotClean)
	case le.Uint32(sb[superIncompat:])&incompatRecover != 0:
		return fmt.Errorf("%w: it is mounted or was not unmounted in order", ErrNotClean)
	}
	return nil
}
