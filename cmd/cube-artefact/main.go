// Command cube-artefact turns unpacked Debian packages into what Cube's machines are made of, and into a demo image. The
// set-up scripts call it.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/ociarchive"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/guestimage"
)

func main() {
	// Artefacts are read by machines' uids; the caller's umask must not matter.
	unix.Umask(0o022)
	app := &cli.App{
		Name:  "cube-artefact",
		Usage: "make Cube's artefacts and demo image from unpacked Debian packages",
		Commands: []*cli.Command{
			{
				Name:   "qemu",
				Usage:  "QEMU with its libraries and firmware; prints the new directory",
				Flags:  []cli.Flag{out, packages, path("root", "unpacked packages of QEMU and all it depends on")},
				Action: qemu,
			},
			{
				Name:  "guest",
				Usage: "kernel, initramfs and modules image; prints the new directory",
				Flags: []cli.Flag{
					out, packages, path("kernel", "unpacked kernel package, after depmod"), path("crun", "unpacked packages of crun and all it depends on"),
					path("agent", "the agent's static binary"), path("envd", "cube-envd's static binary"), &cli.StringFlag{Name: "release", Usage: "the kernel's release", Required: true},
				},
				Action: guest,
			},
			{
				Name:  "image",
				Usage: "an OCI archive from the tar of a root file system",
				Flags: []cli.Flag{
					path("out", "the archive to write"), path("rootfs", "uncompressed tar of the root file system"),
					&cli.StringFlag{Name: "name", Usage: "the image's whole name", Required: true},
				},
				Action: image,
			},
		},
	}
	if err := app.Run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "cube-artefact:", err)
		os.Exit(1)
	}
}

var (
	out      = path("out", "directory that the artefact is put in, under its digest")
	packages = path("packages", "file with a package and its version per line")
)

func path(name, usage string) cli.Flag {
	return &cli.PathFlag{Name: name, Usage: usage, Required: true}
}

func qemu(c *cli.Context) error {
	versions, err := readVersions(c.Path("packages"))
	if err != nil {
		return err
	}
	dir, err := artefact.QEMU(c.Path("out"), artefact.Sysroot(c.Path("root")), versions)
	if err != nil {
		return err
	}
	fmt.Println(dir)
	return nil
}

func guest(c *cli.Context) error {
	versions, err := readVersions(c.Path("packages"))
	if err != nil {
		return err
	}
	dir, err := guestimage.Publish(c.Path("out"), guestimage.Input{
		Release:  c.String("release"),
		Kernel:   artefact.Sysroot(c.Path("kernel")),
		Crun:     artefact.Sysroot(c.Path("crun")),
		Agent:    c.Path("agent"),
		Envd:     c.Path("envd"),
		Packages: versions,
	})
	if err != nil {
		return err
	}
	fmt.Println(dir)
	return nil
}

func image(c *cli.Context) error {
	return ociarchive.Write(c.Path("out"), ociarchive.Image{
		Name:   c.String("name"),
		Rootfs: c.Path("rootfs"),
		Config: v1.Config{
			Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			Cmd: []string{"bash"},
		},
	})
}

// readVersions reads lines of a package, its version and possibly more.
func readVersions(file string) (map[string]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	versions := map[string]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 {
			return nil, fmt.Errorf("%s: %q is not a package and its version", file, lines.Text())
		}
		versions[fields[0]] = fields[1]
	}
	return versions, lines.Err()
}
