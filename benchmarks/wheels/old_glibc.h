/* Included before each source of a wheel for Linux on x86-64, where the newest glibc versions of these would be asked
 * for. The older ones are in every glibc since 2.14, the newer ones in no machine older than the one that builds. */
#if defined(__x86_64__) && defined(__gnu_linux__)
__asm__(".symver hypot, hypot@GLIBC_2.2.5");
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_join, pthread_join@GLIBC_2.2.5");
#endif
